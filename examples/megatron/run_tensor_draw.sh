#!/usr/bin/env bash
# tensor_saver's command line, on capd (docs/migration-runs.md): collects by its sibling, draws with `capd report`.
set -eu
mode=visualize store=./enhanced_tensor_logs out=./draw workers=4 code=0 collect=(single)
while (($#)); do case $1 in
    collect | visualize | both) mode=$1 ;; bf16 | mxfp8 | mxfp4 | hifp8) collect+=(--quant-type "$1") ;; --mode) ;;
    --tensor-dir) store=$2 && shift ;; --output-dir) out=$2 && shift ;; --max-workers) workers=$2 && shift ;;
    --quant-type | --control-iter | --control-micro-batches | --collect-micro-batches | --tokenizer-path | --data-path | --dtype)
        collect+=("$1" "$2") && shift ;;
    *) echo "usage: $0 [collect|visualize|both] [bf16|mxfp8|mxfp4|hifp8] [--OPTION VALUE]..., not $1" >&2 && exit 2 ;;
esac && shift; done
[ "$mode" = visualize ] || bash "$(dirname "$0")/run_tensor_collection.sh" "${collect[@]}" --tensor-path "$store" || code=$?
[ "$mode" = collect ] || capd report "$store" --all-runs --workers "$workers" --out "$out"
exit $code
