"""The two names of an output's gradient: tensor_saver recorded dY as the `input` of a backward."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from capd_client.protocol.key import Key

__all__ = ["answers"]


def answers(row: Key, field: str, wanted: Container[Any]) -> bool:
    """Return whether a field of `row` has one of the wanted values. "grad_output" also matches a backward's `input`."""
    if getattr(row, field) in wanted:
        return True
    if field != "tensor_name" or "grad_output" not in wanted:
        return False
    return row.tensor_name == "input" and row.operation == "backward"
