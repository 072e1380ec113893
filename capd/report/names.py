"""The values of fields in the words of reports, and what a tensor's name says of it."""

from __future__ import annotations

from capd.analyze.groups import Value
from capd_client.process.text import printable

__all__ = ["is_gradient", "value_text"]


def value_text(value: Value) -> str:
    """Return a field's value for people."""
    return "none" if value is None else printable(str(value)) or '""'


def is_gradient(tensor_name: Value) -> bool:
    """Return whether a tensor holds gradients, by its name. They shrink by orders of magnitude during training."""
    return "grad" in str(tensor_name).lower()
