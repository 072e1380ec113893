"""The values of fields in the words of reports, and what a tensor's name says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capd.analyze.groups import Value
from capd_client.process.text import human_count, human_nbytes, printable

__all__ = ["is_gradient", "sample_text", "value_text"]


def value_text(value: Value) -> str:
    """Return a field's value for people."""
    return "none" if value is None else printable(str(value)) or '""'


def is_gradient(tensor_name: Value) -> bool:
    """Return whether a tensor holds gradients, by its name. They shrink by orders of magnitude during training."""
    return "grad" in str(tensor_name).lower()


def sample_text(sample: Mapping[str, Any]) -> str:
    """Return what a sample has read (`capd.report.format_errors.sample_numbers`), and how exact its errors are."""
    percent = 100 * sample["records"] / max(1, sample["of_records"])
    read = (
        f"{human_count(sample['records'])} of {human_count(sample['of_records'], 'record')} were read, "
        f"{percent:.3g} %, {human_nbytes(sample['raw_bytes'])}; stored statistics cover all"
    )
    known = [f"{label} {error:.2g}" for label, error in sample["sqnr_db_error"].items() if error is not None]
    return f"{read}; standard error of the SQNR of all, in dB: {', '.join(known)}" if known else read
