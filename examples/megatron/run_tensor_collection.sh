#!/usr/bin/env bash
# The predecessor's command line, on capd (docs/migration-runs.md). TRAIN_SCRIPT names another training script.
set -eu
train=${TRAIN_SCRIPT:-examples/llama/train_llama32_1b_h100_fp8.sh} mode=single type=mxfp8 store=./enhanced_tensor_logs
tokenizer=model/llama3.2-1b data=dataset/wikipedia_processed/wikipedia_processed_text_document dtype=bf16 n=1 m=1
while (($#)); do case $1 in single | batch | quick) mode=$1 && shift ;; bf16 | mxfp8 | mxfp4 | hifp8) type=$1 && shift ;;
    --mode) mode=$2 && shift 2 ;; --quant-type) type=$2 && shift 2 ;; --tensor-path) store=$2 && shift 2 ;;
    --tokenizer-path) tokenizer=$2 && shift 2 ;; --data-path) data=$2 && shift 2 ;; --dtype) dtype=$2 && shift 2 ;;
    --control-iter | --control-micro-batches) n=$2 && shift 2 ;; --collect-micro-batches) m=$2 && shift 2 ;;
    *) echo "usage: $0 [single|batch|quick] [bf16|mxfp8|mxfp4|hifp8] [--OPTION VALUE]..., see docs/migration-runs.md" >&2 && exit 2 ;;
    esac; done
if [ "$mode" = batch ] && [[ $type != *,* ]]; then type=bf16,mxfp8,mxfp4,hifp8; fi
exec capd run --mode "$mode" --quant-type "$type" --store "$store" --control-iter "$n" --collect-micro-batches "$m" \
    --require "$train" --require "$data" --env 'HOST_TENSORBOARD_LOGS_PATH={run_dir}/tensorboard' -- \
    bash "$train" '{run_dir}/checkpoints' '{run_dir}/tensorboard' "$tokenizer" "$data" "$dtype"
