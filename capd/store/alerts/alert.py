"""One alert of a rule, and its line in the file of a node."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from capd.strict_json import json_number
from capd_client.protocol.key import MAX_INDEX

__all__ = [
    "MAX_LINE_NBYTES", "MAX_LISTED_SERIES", "SEVERITIES", "Alert", "AlertNumber", "alert_line", "alert_number",
    "alert_of",
]  # fmt: skip

MAX_LINE_NBYTES = 64 << 10
MAX_LISTED_SERIES = 20
_MAX_CHARS = 8192

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
AlertNumber = float | Literal["NaN", "Infinity", "-Infinity"]

_Text = Annotated[str, msgspec.Meta(max_length=_MAX_CHARS)]
_Index = Annotated[int, msgspec.Meta(ge=0, le=MAX_INDEX)]


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that fired for one rank at one iteration.

    Attributes:
        time_ns: When, as nanoseconds since 1970.
        rule: The name of the rule.
        severity: "info", "warning" or "critical".
        metric: What it looks at, as in the rule.
        run, node: Where.
        rank, iteration, micro_batch: Of the first series that fired.
        attempt: The attempt of the job.
        series: The path of this series; "" for a rank.
        value: The value there; "NaN", "Infinity" or "-Infinity" if it is no finite number.
        limit: The limit that it passed.
        text: One line for people.
        count: The series that fired at this iteration of the rank; 0 for a rank.
        series_paths: The first 20 of them.
    """

    time_ns: _Index
    rule: _Text
    severity: Severity
    metric: _Text
    run: _Text
    node: _Text
    rank: _Index
    iteration: _Index
    micro_batch: _Index
    series: _Text
    value: AlertNumber
    limit: AlertNumber
    text: _Text
    count: _Index
    series_paths: Annotated[list[_Text], msgspec.Meta(max_length=MAX_LISTED_SERIES)]
    attempt: _Index = 0


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Alert).decode


def alert_number(value: float) -> AlertNumber:
    """Return a number as an alert has it."""
    found = json_number(float(value))
    assert found is not None  # noqa: S101 - it is a float
    return found  # type: ignore[return-value]


def alert_line(alert: Alert) -> bytes:
    """Return the line of an alert. Series that do not fit are left out of `series_paths`; `count` has them."""
    line = _encode(alert) + b"\n"
    while len(line) > MAX_LINE_NBYTES and alert.series_paths:
        alert = msgspec.structs.replace(
            alert, series_paths=alert.series_paths[: len(alert.series_paths) // 2]
        )
        line = _encode(alert) + b"\n"
    return line


def alert_of(line: bytes) -> Alert | None:
    """Return the alert of a line without its end; None if the line is damaged."""
    if len(line) >= MAX_LINE_NBYTES:
        return None
    try:
        return _decode(line)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
