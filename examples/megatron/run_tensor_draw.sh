#!/usr/bin/env bash
# The predecessor's command line, on capd (docs/migration-runs.md): collects by its sibling, draws with `capd report`.
set -eu
mode=visualize type=mxfp8 store=./enhanced_tensor_logs out=./draw workers=4 code=0 more=()
while (($#)); do case $1 in collect | visualize | both) mode=$1 && shift ;; bf16 | mxfp8 | mxfp4 | hifp8) type=$1 && shift ;;
    --mode) mode=$2 && shift 2 ;; --quant-type) type=$2 && shift 2 ;; --tensor-dir) store=$2 && shift 2 ;;
    --output-dir) out=$2 && shift 2 ;; --max-workers) workers=$2 && shift 2 ;;
    --control-iter | --control-micro-batches | --collect-micro-batches | --tokenizer-path | --data-path | --dtype)
        more+=("$1" "$2") && shift 2 ;;
    *) mode=$1 && break ;;
    esac; done
case $mode in visualize) ;; collect | both)
    bash "$(dirname "$0")/run_tensor_collection.sh" single --quant-type "$type" --tensor-path "$store" "${more[@]}" || code=$? ;;
    *) echo "usage: $0 [collect|visualize|both] [bf16|mxfp8|mxfp4|hifp8] [--OPTION VALUE]..., not $mode" >&2 && exit 2 ;;
    esac
[ "$mode" = collect ] || capd report "$store" --all-runs --workers "$workers" --out "$out"
exit $code
