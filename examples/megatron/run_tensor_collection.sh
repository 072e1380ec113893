#!/usr/bin/env bash
# tensor_saver's command line, on capd (docs/migration-runs.md). TRAIN_SCRIPT names another training script.
set -eu
train=${TRAIN_SCRIPT:-examples/llama/train_llama32_1b_h100_fp8.sh} tokenizer=model/llama3.2-1b dtype=bf16
data=dataset/wikipedia_processed/wikipedia_processed_text_document run=(--mode single --store ./enhanced_tensor_logs)
while (($#)); do case $1 in
    single | batch | quick) run+=(--mode "$1") ;; bf16 | mxfp8 | mxfp4 | hifp8) run+=(--quant-type "$1") ;;
    --data-path) data=$2 && shift ;; --tokenizer-path) tokenizer=$2 && shift ;; --dtype) dtype=$2 && shift ;;
    --tensor-path) run+=(--store "$2") && shift ;; --yes | --json | --label-only | --help) run+=("$1") ;; --*) run+=("$1" "$2") && shift ;;
    *) echo "$0: $1 is neither a mode (single, batch, quick) nor a type (bf16, mxfp8, mxfp4, hifp8)" >&2 && exit 2 ;;
esac && shift; done
exec capd run "${run[@]}" --require "$train" --require "$data" --env 'HOST_TENSORBOARD_LOGS_PATH={run_dir}/tensorboard' \
    -- bash "$train" '{run_dir}/checkpoints' '{run_dir}/tensorboard' "$tokenizer" "$data" "$dtype"
