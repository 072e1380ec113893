"""The result of a check as a JSON document: the products by group, those beyond a limit, and what was left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from capd.check.checking import Checked, Finding
from capd.check.comparable import TITLES
from capd.check.factors import FIT, factor_names
from capd.check.judging import JudgedLines, ProductLimits

__all__ = ["MOST_BEYOND", "check_document"]

MOST_BEYOND = 1000
"""The products beyond a limit that a document names. All are counted."""
_PLACE = ("quant_type", "rank", "stack", "layer", "module", "iteration", "micro_batch", "call", "attempt")


def check_document(
    source: str, checked: Checked, limits: ProductLimits, fields: tuple[str, ...], *, is_whole: bool
) -> dict[str, Any]:
    """Return the document of a check (docs/json.md). `fields`: what groups are made by."""
    groups: dict[tuple[Any, ...], list[Finding]] = {}
    for one in checked.findings:
        groups.setdefault(tuple(_place(one)[name] for name in fields), []).append(one)
    beyond, batches = checked.beyond, _micro_batches(checked.findings)
    return {
        "source": source,
        "operands": "logical" if is_whole else "rank",
        "limits": {"tensor": limits.tensor, "row": limits.row},
        "calls": checked.calls,
        "checked": len(checked.findings),
        "beyond": len(beyond),
        "by": list(fields),
        "all": _products(checked.findings),
        "groups": [
            {**dict(zip(fields, place, strict=True)), "products": _products(found)}
            for place, found in groups.items()
        ]
        if fields
        else [],
        "first": [_plain(one, batches) for one in beyond[:MOST_BEYOND]],
        "not_comparable": [
            {"reason": reason, "products": count} for reason, count in checked.left_out.most_common()
        ],
        "skipped": [{"name": one.name, "reason": one.reason} for one in checked.skipped],
    }


def _products(findings: Iterable[Finding]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for one in findings:
        judged = one.judgement
        numbers = found.setdefault(
            one.product, {"checked": 0, "beyond": 0, "error": 0.0, "row_error": 0.0, "biased": 0, "tf32": 0}
        )
        numbers["checked"] += 1
        numbers["beyond"] += judged.is_beyond
        numbers["biased"] += judged.has_bias
        numbers["tf32"] += judged.precision == "tf32" and not judged.is_beyond
        numbers["error"] = max(numbers["error"], judged.error)
        numbers["row_error"] = max(numbers["row_error"], judged.rows.worst, judged.columns.worst)
    return {name: found[name] for name in TITLES if name in found}


def _plain(one: Finding, micro_batches: int) -> dict[str, Any]:
    judged = one.judgement
    return {
        **_place(one),
        "product": one.product,
        "name": one.call.tensors[one.product].name,
        "shape": list(one.leading),
        "error": judged.error,
        "precision": judged.precision,
        "rows": _lines(judged.rows),
        "columns": _lines(judged.columns),
        "factor": _factor(one, micro_batches),
    }


def _lines(lines: JudgedLines) -> dict[str, Any]:
    return {"beyond": lines.beyond, "of": lines.of, "first": list(lines.first), "error": lines.worst}


def _factor(one: Finding, micro_batches: int) -> dict[str, Any] | None:
    judged = one.judgement
    if judged.alpha is None or judged.rest is None or not math.isfinite(judged.alpha):
        return None
    # What is left must be small against the product, or the factor fits nothing.
    names: list[str] = []
    if abs(judged.alpha - 1) > FIT:
        names = factor_names(judged.alpha, _sizes(one, micro_batches))
    return {"alpha": judged.alpha, "rest": judged.rest, "is": names}


def _sizes(one: Finding, micro_batches: int) -> Mapping[str, int]:
    found = {
        name: value
        for tensor in one.call.tensors.values()
        for name, value in tensor.attributes.items()
        if name.endswith("_size") and type(value) is int
    }
    return {**found, "micro_batches": micro_batches}


def _micro_batches(findings: Iterable[Finding]) -> int:
    return len({one.call.place["micro_batch"] for one in findings})


def _place(one: Finding) -> dict[str, Any]:
    place = one.call.place
    return {**{name: place[name] for name in _PLACE}, "module": f"{place['module']}{one.suffix}"}
