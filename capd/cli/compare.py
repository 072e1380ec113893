"""`capd compare`: what every format makes of one capture, or two captures record by record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capd.analyze.format_choice import DEFAULT_FORMATS
from capd.cli.compare_request import Request
from capd.cli.selection import Tests, selects_keys
from capd.cli.sources import AllRuns, LayerBase, Workers
from capd.cli.stores import RunOption, StoreArgument

__all__ = ["compare"]


@selects_keys
def compare(
    store: StoreArgument = None,
    other: Annotated[
        Path | None,
        typer.Argument(
            metavar="[OTHER]", help="A second run to compare with, record by record.", show_default=False
        ),
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Formats to measure: mxfp8,mxfp8:e5m2:rceil,nvfp4:16x16,hifp8.",
            show_default=DEFAULT_FORMATS,
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="FIELDS", help="Group by these: layer,phase,tensor_name.", show_default="tensor_name"
        ),
    ] = None,
    axis: Annotated[
        str | None,
        typer.Option(metavar="-1|-2|both", help="Blocks along rows, columns, or both.", show_default="-1"),
    ] = None,
    per_block: Annotated[
        bool, typer.Option("--per-block", help="How the errors and ranges of single blocks are spread, too.")
    ] = False,
    sweep_scale: Annotated[
        bool,
        typer.Option(
            "--sweep-scale", help="One scale per tensor, from aligned with max to aligned with min."
        ),
    ] = False,
    between: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=A,B", help="Compare two values of a field within STORE: quant_type=bf16,mxfp8."
        ),
    ] = None,
    ignore: Annotated[
        str | None, typer.Option(metavar="FIELDS", help="Fields in which records of one pair may differ.")
    ] = None,
    records: Annotated[bool, typer.Option("--records", help="A row for each pair of records.")] = False,
    first_divergence: Annotated[
        bool,
        typer.Option(
            "--first-divergence", help="Stop at the first pair, in order of execution, that differs."
        ),
    ] = False,
    tolerance: Annotated[
        float,
        typer.Option(min=0.0, help="A pair differs where max|a-b| > this times max|a|; 0: where a bit does."),
    ] = 0.0,
    run: RunOption = None,
    all_runs: AllRuns = False,
    layer_base: LayerBase = 0,
    tests: Tests = (),
    workers: Workers = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare what number formats make of captured tensors, or two captures with each other.

    With one STORE: the error of each format on its high-precision records, no second run needed. With OTHER, or
    --between: the same records of two runs, quant types or ranks. STORE may be a directory of .pt files. What cannot be
    read is named and skipped (exit code 4 for a damaged record, 1 for a bad file). Exits with 5 when nothing matches.
    """
    request = Request(
        store=store, other=other, run=run, all_runs=all_runs, layer_base=layer_base, tests=tests, workers=workers,
        by=by, as_csv=as_csv, as_json=as_json,
    )  # fmt: skip
    only_pairs = {"--ignore": ignore, "--records": records, "--first-divergence": first_divergence,
                  "--tolerance": tolerance}  # fmt: skip
    only_formats = {"--axis": axis, "--per-block": per_block}
    if other is not None or between is not None:
        request.refuse(
            "two captures",
            {"--formats": formats, "--sweep-scale": sweep_scale, "--all-runs": all_runs, **only_formats},
        )
        from capd.cli.compare_pairs import compare_pairs

        code = compare_pairs(
            request, between=between, ignore=ignore, each=records, first=first_divergence, tolerance=tolerance
        )
    elif sweep_scale:
        request.refuse("--sweep-scale", {**only_pairs, **only_formats})
        from capd.cli.compare_sweep import compare_sweep

        code = compare_sweep(request, formats)
    else:
        request.refuse("one capture", only_pairs)
        from capd.cli.compare_formats import compare_formats

        code = compare_formats(
            request, DEFAULT_FORMATS if formats is None else formats, axis or "-1", per_block=per_block
        )
    raise typer.Exit(code)
