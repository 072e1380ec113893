#!/usr/bin/env bash
# train_gpt.py as run_tensor_collection.sh wants it: CHECKPOINTS LOGS TOKENIZER DATA DTYPE. PARALLEL is tensor or data.
set -eu
exec torchrun --standalone --nproc-per-node "${RANKS:-2}" "$(dirname "$0")/train_gpt.py" "$@" --parallel "${PARALLEL:-tensor}"
