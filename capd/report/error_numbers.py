"""The errors of formats and the outlier channels of groups, as numbers for the JSON and the text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from capd.analyze.error_sums import Errors
from capd.analyze.groups import Fields, Groups, Tally
from capd.report.format_errors import COUNTS, METRICS
from capd.report.gather import BY_LAYER, BY_TENSOR, BY_TYPE_AND_LAYER
from capd.report.names import value_text
from capd_client.texts import human_count, table_lines

__all__ = ["error_lines", "error_numbers"]

_GROUPINGS: tuple[Fields, ...] = (
    (),
    ("quant_type",),
    ("tensor_name",),
    BY_TENSOR,
    BY_TYPE_AND_LAYER,
    BY_LAYER,
)
_LARGEST = 8
_SHOWN = ("SQNR dB", "relative", "cosine", "underflow", "saturation", "flush")


def error_numbers(grouping: Fields, tally: Tally) -> dict[str, Any]:
    """`errors` and `channels` of a group; nothing for groupings that may have very many groups."""
    if grouping not in _GROUPINGS:
        return {}
    found = [
        {
            "channels": one.channels,
            "width": one.width,
            "rows": one.rows,
            "records": one.records,
            "outlier_percent": one.outlier_percent,
            "amax_ratio": one.amax_ratio,
            "largest": [
                {"channel": at, "amax": amax, "outliers": outliers}
                for at, amax, outliers in one.largest(_LARGEST)
            ],
        }
        for _, one in sorted(tally.channels.items())
    ]
    return {
        "errors": {
            name: {each: getattr(errors, each) for each in (*COUNTS, *METRICS)}
            for name, errors in tally.errors.items()
        },
        "channels": found,
    }


def error_lines(groups: Groups) -> Iterator[str]:
    """The errors by quant type, tensor name and format as a table; nothing where no format was measured."""
    rows = [
        (value_text(one), value_text(tensor), name, human_count(errors.count), *_cells(errors))
        for (one, tensor), tally in groups.by(*BY_TENSOR).items()
        for name, errors in tally.errors.items()
    ]
    if rows:
        yield ""
        header = ("error of", "tensor_name", "format", "count", *_SHOWN)
        yield from table_lines(header, rows, header[3:])


def _cells(errors: Errors) -> tuple[str, ...]:
    sqnr, cosine = errors.sqnr_db, errors.cosine
    relative = None if errors.relative is None else 100 * errors.relative
    shares = (errors.underflow_percent, errors.saturation_percent, errors.flush_percent)
    return (
        "-" if sqnr is None else f"{sqnr:.2f}",
        _percent(relative),
        "-" if cosine is None else f"{cosine:.6f}",
        *map(_percent, shares),
    )


def _percent(percent: float | None) -> str:
    return "-" if percent is None else f"{percent:.4g} %"
