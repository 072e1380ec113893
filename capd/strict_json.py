"""Floats in strict JSON, which has neither NaN nor infinities."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["json_number", "strict_json"]


def json_number(value: float | None) -> float | str | None:
    """Return a float for strict JSON. NaN and infinities become the strings "NaN", "Infinity", "-Infinity"."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def strict_json(value: Any) -> Any:
    """Return the value with all its floats as `json_number` returns them."""
    if isinstance(value, dict):
        return {name: strict_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [strict_json(item) for item in value]
    return json_number(value) if isinstance(value, float) else value
