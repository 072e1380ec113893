"""`capd compare STORE`: the error of every format on the captured high-precision tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capd.cli.compare.request import CompareRequest, name_some, place_of, shown_metric
from capd.cli.compare.verdict import print_verdict, verdict_table
from capd.cli.output import human_count, note, print_lines
from capd.cli.table import Column, aligned, print_columns
from capd.errors import ConfigError, NothingMatched

__all__ = ["compare_formats", "print_errors", "say_unmeasured"]

_AXES = {"-1": (-1,), "-2": (-2,), "both": (-1, -2)}
# The columns of the table by metric, and the order in which a narrow terminal does without them.
_SHOWN = {
    "sqnr_db": ("SQNR dB", 0), "lost": ("lost", 0), "underflow_percent": ("underflow %", 1),
    "saturation_percent": ("saturated %", 2), "flush_percent": ("flushed %", 4), "max_abs": ("max abs", 5),
    "relative": ("relative", 6), "cosine": ("1 - cosine", 7),
}  # fmt: skip


def compare_formats(request: CompareRequest, formats: str, axis: str, *, per_block: bool) -> int:
    """Measure the formats, print the errors and return the exit code."""
    from capd.analyze.format_choice import choices

    if axis not in _AXES:
        raise ConfigError(f"--axis cannot be {axis!r}; use one of {', '.join(_AXES)}")
    chosen = choices(formats, _AXES[axis])
    is_verdict = request.by is None and not per_block
    from capd.report.format_errors import error_document
    from capd.report.verdict_document import verdict_document

    # The table of the verdict shows no groups.
    fields = () if is_verdict and not request.as_json else request.fields
    found, gathered = request.gather(fields, choices=chosen, per_block=per_block, products=is_verdict)
    if not gathered.groups.whole().errors:
        reasons = "; ".join(dict.fromkeys(reason for _, reason in gathered.unmeasured))
        raise NothingMatched(f"no record with a high-precision source in {', '.join(found.names)}: {reasons}")
    verdict = verdict_document(gathered, chosen)
    document = {**error_document(found.names, gathered, chosen, fields), "verdict": verdict, "lab": None}
    print_errors(request, document, verdict=is_verdict, per_block=per_block)
    say_unmeasured(gathered.unmeasured)
    return found.exit_code(gathered)


def print_errors(
    request: CompareRequest, document: dict[str, Any], *, verdict: bool, per_block: bool = False
) -> None:
    """Print the verdict or the groups of a document, as JSON, CSV or tables."""
    if verdict:
        if not request.print(document, *verdict_table(document["verdict"])):
            print_verdict(document["verdict"], wide=request.wide)
    else:
        _print_groups(request, document, per_block=per_block)


def _print_groups(request: CompareRequest, document: dict[str, Any], *, per_block: bool) -> None:
    """Print the errors of each group as JSON, CSV or a table."""
    from capd.report.format_errors import COUNTS, METRICS

    fields = document["by"]
    groups = document["groups"] or [document["all"]]
    columns = (*COUNTS, *METRICS)
    header = (*fields, "format", "best", *columns)
    rows = [
        [
            *(group[field] for field in fields),
            label,
            label == group["best"],
            *(errors[name] for name in columns),
        ]
        for group in groups
        for label, errors in group["errors"].items()
    ]
    if not request.print(document, header, rows):
        _print_table(fields, groups, wide=request.wide, is_sample=document["sample"] is not None)
        if per_block:
            _print_blocks(fields, groups, wide=request.wide)


def say_unmeasured(unmeasured: Mapping[tuple[str, str], int]) -> None:
    """Name on stderr the records without errors, by series or file and reason."""
    if unmeasured:
        names = [f"{name} ({reason})" for name, reason in unmeasured]
        name_some("record", "not measured", names, sum(unmeasured.values()))


def _print_table(
    fields: Sequence[str], groups: Sequence[Mapping[str, Any]], *, wide: bool, is_sample: bool
) -> None:
    rows = [(group, label, errors) for group in groups for label, errors in group["errors"].items()]
    places = [place_of(fields, group) for group, _, _ in rows]
    best = [label == group["best"] for group, label, _ in rows]
    shown = {"sqnr_db": _SHOWN["sqnr_db"], "sqnr_db_error": ("± dB", 0), **_SHOWN} if is_sample else _SHOWN
    numbers = {name: aligned([shown_metric(errors, name) for _, _, errors in rows]) for name in shown}
    columns = [
        *(Column(field, [place[at] for place in places], is_name=True) for at, field in enumerate(fields)),
        Column("format", [label for _, label, _ in rows], is_name=True),
        Column("records", [human_count(errors["records"]) for _, _, errors in rows], right=True, spare=3),
        *(Column(title, numbers[name], right=True, spare=spare) for name, (title, spare) in shown.items()),
        Column("", ["best" if one else "" for one in best]),
    ]
    print_columns(columns, wide=wide, colours=["green" if one else "" for one in best])


def _print_blocks(fields: Sequence[str], groups: Sequence[Mapping[str, Any]], *, wide: bool) -> None:
    from capd.report.format_errors import BLOCK_SHARES

    rows = [
        (group, label, errors["blocks"])
        for group in groups
        for label, errors in group["errors"].items()
        if errors["blocks"] is not None
    ]
    if not rows:
        note("none of the formats has blocks")
        return
    places = [place_of(fields, group) for group, _, _ in rows]
    levels = [blocks["sqnr_db"] or {} for _, _, blocks in rows]
    print_lines(["", "SQNR in dB of single blocks, quantiles; scale std in powers of two:"])
    columns = [
        *(Column(field, [place[at] for place in places], is_name=True) for at, field in enumerate(fields)),
        Column("format", [label for _, label, _ in rows], is_name=True),
        Column("blocks", [human_count(blocks["count"]) for _, _, blocks in rows], right=True, spare=2),
        Column("saturated %", aligned([blocks["saturated_percent"] for _, _, blocks in rows]), right=True),
        Column("scale std", aligned([blocks["scale_log2_std"] for _, _, blocks in rows]), right=True),
        *(
            Column(
                f"{100 * share:g} %",
                aligned([level.get(str(share)) for level in levels]),
                right=True,
                spare=0 if share in (0.01, 0.5, 0.99) else 1,
            )
            for share in BLOCK_SHARES
        ),
    ]
    print_columns(columns, wide=wide)
