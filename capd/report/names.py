"""What a sample has read, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capd.phrase import Phrase, Value
from capd_client.process.text import human_count, human_nbytes

__all__ = ["sample_phrase"]


def sample_phrase(sample: Mapping[str, Any]) -> Phrase:
    """Say what a sample has read (`capd.report.format_errors.sample_numbers`), and how exact its errors are."""
    percent = 100 * sample["records"] / max(1, sample["of_records"])
    known = [f"{label} {error:.2g}" for label, error in sample["sqnr_db_error"].items() if error is not None]
    operands: Value = ""
    if sample["operands"]:
        operands = Phrase("; the products read {0} operands more", (human_count(sample["operands"]),))
    errors: Value = ""
    if known:
        errors = Phrase("; standard error of the SQNR of all, in dB: {0}", (", ".join(known),))
    read = (
        human_count(sample["records"]), human_count(sample["of_records"]), f"{percent:.3g}",
        human_nbytes(sample["raw_bytes"]), operands, errors,
    )  # fmt: skip
    return Phrase("{0} of {1} records were read, {2} %, {3}; short series weigh more in sums{4}{5}", read)
