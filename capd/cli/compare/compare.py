"""`capd compare`: compares number formats on one capture, or two captures record by record."""

from __future__ import annotations

from typing import Annotated

import typer

from capd.analyze.format_choice import DEFAULT_FORMATS
from capd.cli.compare.logical import LogicalOptions, compare_logical
from capd.cli.compare.request import CompareRequest
from capd.cli.completion import field_lists, format_lists, pairs_between
from capd.cli.options import flag, grouped, option

__all__ = ["compare"]


@grouped
def compare(
    *,
    request: CompareRequest,
    formats: Annotated[
        str | None,
        option(
            "--formats",
            "LIST",
            f"Formats to measure, as mxfp8,mxfp8:e5m2:rceil,nvfp4:16x16,hifp8 [default: {DEFAULT_FORMATS}].",
            autocompletion=format_lists,
        ),
    ] = None,
    axis: Annotated[
        str | None,
        option(
            "--axis",
            "-1|-2|both",
            "Blocks along the last axis, the last but one, or each of them [default: -1].",
        ),
    ] = None,
    per_block: Annotated[
        bool, flag("--per-block", "Also show how errors and ranges of single blocks are spread.")
    ] = False,
    lab: Annotated[
        bool,
        flag("--lab", "Show the errors that the daemon measured while capturing, instead of measuring now."),
    ] = False,
    sweep_scale: Annotated[
        bool,
        flag("--sweep-scale", "Try one scale for all values, from aligned with the largest to the smallest."),
    ] = False,
    between: Annotated[
        str | None,
        option(
            "--between",
            "FIELD=A,B",
            "Compare two values of a field within STORE, as quant_type=bf16,mxfp8.",
            autocompletion=pairs_between,
        ),
    ] = None,
    ignore: Annotated[
        str | None,
        option(
            "--ignore",
            "FIELDS",
            "Fields in which the records of a pair may differ.",
            autocompletion=field_lists,
        ),
    ] = None,
    records: Annotated[bool, flag("--records", "Print a row for each pair of records.")] = False,
    first_divergence: Annotated[
        bool, flag("--first-divergence", "Stop at the first pair, in order of execution, that differs.")
    ] = False,
    tolerance: Annotated[
        float,
        option(
            "--tolerance",
            "T",
            "A pair differs if max|a-b| > T·max|a|, or at a NaN or Inf; 0: if any bit differs.",
            min=0.0,
        ),
    ] = 0.0,
    layouts: LogicalOptions,
) -> None:
    """Compare number formats on captured tensors, or two captures with each other.

    With one STORE: a verdict on each format by its error on the high-precision records (bfloat16, float16, float32;
    float64 is rounded to float32): activations, weights and gradients apart, the products of linear layers with
    quantised operands, and the worst tensors. --by shows the errors by group instead. No second training run is
    needed. Other records are named on stderr, counted and left out.
    A format is a name of docs/formats.md, then options after colons: mxfp8:e5m2 (element), mxfp8:rceil (scale
    mode), mxfp4:stochastic (rounding), hifp8:saturate (overflow), legacy, fp8:128 or nvfp4:16x16 (block),
    mxfp4:axis=0 or nvfp4:tensor_scale=no. The label mxfp8:axis=-2 is mxfp8 in blocks along the last axis but one
    (--axis -2 or both); formats without blocks are measured once.

    With OTHER, or with --between: two runs, quant types or ranks, record by record. Two records are a pair if they
    have the same key, iteration, micro_batch, call, sample_idx, batch_idx, sequence_idx and recompute; --ignore
    leaves fields out, --between leaves its own out. If no pair is found and each side has one quant type, records
    are matched without it. Pairs are compared in order of execution, those of files in order of their paths. Any
    dtype is compared; a pair of different dtypes or shapes is named and counted. A pair differs if any bit does, or
    by --tolerance. A difference is no failure: the exit code is 0. The scalars of two runs, such as the loss, are
    compared, too, whatever is selected.

    With OTHER and --logical: whole tensors of two runs whose layouts differ, as one rank and tensor parallelism.
    Parts are put together (docs/logical.md), micro-batches are paired by content, and the limit of each tensor is 4
    times the error that --noise runs show, or a guess. The output names the first tensor that rounding does not
    explain, and the factor by which it is off. The exit code is 1 if any is beyond its limit. The guide is
    docs/comparing-layouts.md.

    With --sweep-scale: one power-of-two scale for all values of a group, at 21 exponents, for the elements e4m3,
    e5m2 and e2m1 or those of --formats.

    With --lab: the errors that the daemon stored while it captured ([lab] in capd.toml, docs/lab.md), of all its
    formats or those of --formats. No tensor is read, so it also works if only statistics were kept.

    STORE may be a directory of .pt files. 128 MiB of records are in memory at once, or one record if it is larger,
    and some 30 MiB for each worker. Matching takes some 800 bytes for each record, --records 2 KiB for each pair. The
    products of a linear layer take ten times its operands, at most 2.5 GiB; larger operands are left out.
    The guide is docs/comparing.md.

    \b
    Examples:
      capd compare captures
      capd compare captures --by layer,tensor_name
      capd compare captures --formats mxfp8,mxfp8:e5m2,nvfp4:16x16 --axis both
      capd compare captures --lab --by layer
      capd compare captures/a.zarr captures/b.zarr --first-divergence
      capd compare captures --between quant_type=bf16,mxfp8 --by layer --csv
      capd compare one.zarr tp2.zarr --logical --noise noise.zarr

    \b
    Fields of --by and --ignore:
      key     quant_type, rank, layer, phase, layer_type, operation, component,
              tensor_name, module, stack
      moment  iteration, micro_batch, call, sample_idx, batch_idx,
              sequence_idx, attempt; or none (of --by)

    \b
    Exit codes:
      1  bad .pt files were skipped, the rest was compared; --logical: a
         tensor is beyond its limit
      2  an unknown format, field or axis; --logical: parts are missing
      4  damaged records were skipped, the rest was compared
      5  nothing matches, no record is of high precision, or no pair was found
    """
    only_pairs = {"--ignore": ignore, "--records": records, "--first-divergence": first_divergence,
                  "--tolerance": tolerance}  # fmt: skip
    only_formats = {"--axis": axis, "--per-block": per_block}
    if layouts.logical:
        request.refuse(
            "whole tensors (--logical)",
            {
                **{name: value for name, value in only_pairs.items() if name != "--first-divergence"},
                **only_formats,
                "--formats": formats,
                "--sweep-scale": sweep_scale,
                "--lab": lab,
                "--between": between,
                "--by": request.by,
                "--all-runs": request.source.all_runs,
                "--sample": request.source.sample,
                "--scheduler": request.cluster.is_used,
            },
        )
        raise typer.Exit(compare_logical(request, layouts, first=first_divergence))
    request.refuse("anything but whole tensors (--logical)", layouts.given())
    if request.other is not None or between is not None:
        request.refuse(
            "two captures",
            {
                "--formats": formats,
                "--sweep-scale": sweep_scale,
                "--all-runs": request.source.all_runs,
                "--sample": request.source.sample,
                "--lab": lab,
                **only_formats,
            },
        )
        from capd.cli.compare.pairs import compare_pairs

        code = compare_pairs(
            request, between=between, ignore=ignore, each=records, first=first_divergence, tolerance=tolerance
        )
    elif sweep_scale:
        request.refuse("--sweep-scale", {**only_pairs, **only_formats, "--lab": lab})
        from capd.cli.compare.sweep import compare_sweep

        code = compare_sweep(request, formats)
    elif lab:
        request.refuse(
            "stored errors (--lab)",
            {
                **only_pairs,
                **only_formats,
                "--sample": request.source.sample,
                "--scheduler": request.cluster.is_used,
            },
        )
        from capd.cli.compare.lab import compare_lab

        code = compare_lab(request, formats)
    else:
        request.refuse("one capture", only_pairs)
        from capd.cli.compare.formats import compare_formats

        code = compare_formats(
            request, DEFAULT_FORMATS if formats is None else formats, axis or "-1", per_block=per_block
        )
    raise typer.Exit(code)
