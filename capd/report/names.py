"""The values of fields in the words of reports."""

from __future__ import annotations

from capd.analyze.groups import Value
from capd_client.process.text import printable

__all__ = ["value_text"]


def value_text(value: Value) -> str:
    """Return a field's value for people."""
    return "none" if value is None else printable(str(value)) or '""'
