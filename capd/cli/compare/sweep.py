"""`capd compare STORE --sweep-scale`: tries one scale for each group, from its maximum's scale to its minimum's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capd.cli.compare.request import CompareRequest, place_of, shown_metric
from capd.cli.output import note
from capd.cli.sources import one_thread_each
from capd.cli.table import Column, aligned, print_columns
from capd.errors import NothingMatched

if TYPE_CHECKING:
    from capd.analyze.groups import Tally
    from capd.analyze.scale_sweep import Sweep

__all__ = ["compare_sweep"]

_METRICS = ("mse", "cosine", "psnr_db", "mae", "relative", "max_abs")
_SHARES = ("saturation_percent", "underflow_percent", "flush_percent")


def compare_sweep(request: CompareRequest, elements: str | None) -> int:
    """Sweep the scales, print the errors and return the exit code."""
    from capd.analyze.scale_sweep import SWEEP_ELEMENTS, elements_of

    chosen = SWEEP_ELEMENTS if elements is None else elements_of(elements)
    fields = request.fields
    one_thread_each()
    found, gathered = request.gather(fields)
    groups = [
        {**dict(zip(fields, values, strict=True)), **_group(tally, chosen)}
        for values, tally in gathered.groups.by(*fields).items()
    ]
    if not any(group["sweeps"] for group in groups):
        raise NothingMatched(f"no finite value other than zero in {', '.join(found.names)}")
    header = (*fields, "element", "exponent", "recommended", "score", *_METRICS, *_SHARES)
    rows = [
        [*(group[field] for field in fields), element, *(level[name] for name in header[len(fields) + 1 :])]
        for group in groups
        for element, sweep in group["sweeps"].items()
        for level in sweep["levels"]
    ]
    skipped = [{"name": one.name, "reason": one.reason} for one in gathered.skipped]
    document = {"sources": found.names, "by": list(fields), "groups": groups, "skipped": skipped}
    if not request.print(document, header, rows):
        _print_table(fields, groups, wide=request.wide)
    if not all(group["exact"] for group in groups):
        note("values of more than 16 bits were rounded to bfloat16 first")
    return found.exit_code(gathered)


def _print_table(fields: Sequence[str], groups: Sequence[Mapping[str, Any]], *, wide: bool) -> None:
    rows = [
        (group, element, level)
        for group in groups
        for element, sweep in group["sweeps"].items()
        for level in sweep["levels"]
    ]
    places = [place_of(fields, group) for group, _, _ in rows]
    levels = [level for _, _, level in rows]
    shown = {"score": 0, "mse": 1, "cosine": 4, "psnr_db": 3, "mae": 5, "relative": 6, "max_abs": 7,
             "saturation_percent": 0, "underflow_percent": 0, "flush_percent": 2}  # fmt: skip
    columns = [
        *(Column(field, [place[at] for place in places], is_name=True) for at, field in enumerate(fields)),
        Column("element", [element for _, element, _ in rows]),
        Column("exponent", [str(level["exponent"]) for level in levels], right=True),
        *(
            Column(
                "1 - cosine" if name == "cosine" else name.replace("_percent", " %"),
                aligned([shown_metric(level, name) for level in levels]),
                right=True,
                spare=spare,
            )
            for name, spare in shown.items()
        ),
        Column("", ["recommended" if level["recommended"] else "" for level in levels]),
    ]
    print_columns(columns, wide=wide, colours=["green" if level["recommended"] else "" for level in levels])


def _group(tally: Tally, elements: tuple[str, ...]) -> dict[str, Any]:
    from capd.analyze.scale_sweep import sweep_scales

    distribution = tally.distribution
    sweeps = {} if distribution is None else {name: sweep_scales(distribution, name) for name in elements}
    return {
        "records": tally.records,
        "exact": distribution is not None and distribution.exact,
        "sweeps": {name: _plain(sweep) for name, sweep in sweeps.items() if sweep is not None},
    }


def _plain(sweep: Sweep) -> dict[str, Any]:
    from capd.analyze.scale_sweep import WEIGHTS

    levels = [
        {
            "exponent": exponent,
            "recommended": level == sweep.recommended,
            "score": score,
            **{name: getattr(errors, name) for name in (*_METRICS, *_SHARES)},
        }
        for level, (exponent, errors, score) in enumerate(
            zip(sweep.exponents, sweep.errors, sweep.scores, strict=True)
        )
    ]
    return {
        "max_align": sweep.max_align,
        "min_align": sweep.min_align,
        "recommended": sweep.exponents[sweep.recommended],
        "best": {metric: sweep.exponents[sweep.best(metric)] for metric in WEIGHTS},
        "levels": levels,
    }
