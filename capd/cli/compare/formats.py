"""`capd compare STORE`: the error of every format on the captured high-precision tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capd.cli.compare.request import CompareRequest, name_some, place_of
from capd.cli.output import human_count, human_number, note, print_lines, print_table
from capd.errors import ConfigError, NothingMatched

if TYPE_CHECKING:
    from capd.report.gather import GatheredRecords

__all__ = ["compare_formats", "one_thread_each"]

_AXES = {"-1": (-1,), "-2": (-2,), "both": (-1, -2)}
_SHOWN = {
    "sqnr_db": "SQNR dB", "relative": "relative", "cosine": "cosine", "max_abs": "max abs", "lost": "lost",
    "underflow_percent": "underflow %", "saturation_percent": "saturated %", "flush_percent": "flushed %",
}  # fmt: skip


def compare_formats(request: CompareRequest, formats: str, axis: str, *, per_block: bool) -> int:
    """Measure the formats, print the errors and return the exit code."""
    from capd.analyze.format_choice import choices

    if axis not in _AXES:
        raise ConfigError(f"--axis cannot be {axis!r}; use one of {', '.join(_AXES)}")
    chosen = choices(formats, _AXES[axis])
    fields = request.fields
    from capd.report.format_errors import COUNTS, METRICS, error_document

    one_thread_each()
    found, gathered = request.gather(choices=chosen, per_block=per_block)
    if not gathered.groups.whole().errors:
        reasons = "; ".join(dict.fromkeys(reason for _, reason in gathered.unmeasured))
        raise NothingMatched(f"no record with a high-precision source in {', '.join(found.names)}: {reasons}")
    document = error_document(found.names, gathered, chosen, fields)
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
        _print_table(fields, groups)
        if per_block:
            _print_blocks(fields, groups)
    _say_unmeasured(gathered)
    return found.exit_code(gathered)


def one_thread_each() -> None:
    """Limit torch to one thread for each of our threads. Otherwise torch's threads would wait for each other."""
    import torch

    torch.set_num_threads(1)


def _say_unmeasured(gathered: GatheredRecords) -> None:
    """Name on stderr the records without a high-precision source."""
    if gathered.unmeasured:
        names = [f"{name} ({reason})" for name, reason in gathered.unmeasured]
        name_some("record", "not measured", names, sum(gathered.unmeasured.values()))


def _print_table(fields: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> None:
    header = (*fields, "format", "records", *_SHOWN.values(), "")
    rows = []
    for group in groups:
        for label, errors in group["errors"].items():
            numbers = [human_number(errors[name]) for name in _SHOWN]
            best = "best" if label == group["best"] else ""
            rows.append((*place_of(fields, group), label, human_count(errors["records"]), *numbers, best))
    print_table(header, rows, right=("records", *_SHOWN.values()))


def _print_blocks(fields: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> None:
    from capd.report.format_errors import BLOCK_SHARES

    shares = [f"{100 * share:g} %" for share in BLOCK_SHARES]
    header = (*fields, "format", "blocks", "saturated %", "scale std", *shares)
    rows = []
    for group in groups:
        for label, errors in group["errors"].items():
            blocks = errors["blocks"]
            if blocks is not None:
                levels = (blocks["sqnr_db"] or dict.fromkeys(shares)).values()
                numbers = [blocks["saturated_percent"], blocks["scale_log2_std"], *levels]
                shown = [human_count(blocks["count"]), *map(human_number, numbers)]
                rows.append((*place_of(fields, group), label, *shown))
    if not rows:
        note("none of the formats has blocks")
        return
    print_lines(["", "SQNR in dB of single blocks, quantiles; scale std in powers of two:"])
    print_table(header, rows, right=header[len(fields) + 1 :])
