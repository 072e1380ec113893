"""What the fault tests measured, gathered over the session: printed at its end, written where CAPD_FIGURES says."""

from __future__ import annotations

import json
import os
from pathlib import Path

_ROWS: dict[str, dict[str, float | int | str]] = {}


def note(test: str, **values: float | int | str) -> None:
    """Keep figures of one test; those of a second call are added to them."""
    _ROWS.setdefault(test, {}).update(values)


def lines() -> list[str]:
    """The table, one line per test."""
    width = max(map(len, _ROWS), default=0)
    return [
        f"{test:<{width}}  " + "  ".join(f"{k}={v}" for k, v in row.items())
        for test, row in sorted(_ROWS.items())
    ]


def write() -> None:
    """Write the figures as JSON to the file that CAPD_FIGURES named when the session began, if it did."""
    if _TARGET and _ROWS:
        Path(_TARGET).write_text(json.dumps(_ROWS, indent=2, sort_keys=True) + "\n")


_TARGET = os.environ.get("CAPD_FIGURES")  # the tests themselves run without any CAPD_ variable
