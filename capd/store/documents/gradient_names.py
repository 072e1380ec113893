"""The two names of an output's gradient: tensor_saver recorded dY as the `input` of a backward."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Protocol

__all__ = ["answers"]


class Named(Protocol):
    """A key, or a row of a listing."""

    @property
    def tensor_name(self) -> str: ...

    @property
    def operation(self) -> str: ...


def answers(row: Named, field: str, wanted: Container[Any]) -> bool:
    """Return whether a field of `row` has one of the wanted values. "grad_output" also matches a backward's `input`."""
    if getattr(row, field) in wanted:
        return True
    if field != "tensor_name" or "grad_output" not in wanted:
        return False
    return row.tensor_name == "input" and row.operation == "backward"
