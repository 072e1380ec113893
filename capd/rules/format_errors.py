"""The metrics of the errors of formats, which the lab measures on a sample of the records.

Rules name a format as `[lab] formats` does. This module knows no class of the lab: it asks for the numbers by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

__all__ = ["ERROR_KINDS", "MEASURED_FORMATS", "ErrorKind", "FormatErrors", "ScaleSpread"]

MEASURED_FORMATS = ("bf16", "fp16", "fp8", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "hif4", "hifp8")
"""The formats that a lab can measure, without torch. The tests compare them with `capd_client.formats`."""

_WITHOUT_BLOCKS = ("bf16", "fp16", "hifp8")


class ScaleSpread(Protocol):
    """The scales of a format's blocks."""

    @property
    def scale_log2_std(self) -> float | None:
        """The standard deviation of log2(scale)."""


class FormatErrors(Protocol):
    """The errors of one format on one record, as `capd.analyze.error_sums.Errors` has them."""

    @property
    def count(self) -> int:
        """All values."""

    @property
    def underflows(self) -> int:
        """The values that became zero."""

    @property
    def saturations(self) -> int:
        """The values beyond the largest one of the format."""

    @property
    def flushes(self) -> int:
        """The values below the smallest normal one."""

    @property
    def sqnr_db(self) -> float | None:
        """The signal to quantisation noise."""

    @property
    def relative(self) -> float | None:
        """The relative error."""

    @property
    def blocks(self) -> ScaleSpread | None:
        """The blocks; None without scales."""


class ErrorKind(NamedTuple):
    """One number of the errors of a format.

    Attributes:
        low, high: The bounds of its values.
        words: The number in words; the format follows them.
        value: The number; None if the record has none.
        formats: The formats that have it.
    """

    low: float
    high: float
    words: str
    value: Callable[[FormatErrors], float | None]
    formats: tuple[str, ...] = MEASURED_FORMATS


def _scale_std(errors: FormatErrors) -> float | None:
    return None if errors.blocks is None else errors.blocks.scale_log2_std


def _share(number: int, count: int) -> float | None:
    return number / count if count else None


ERROR_KINDS = {
    "sqnr": ErrorKind(
        -math.inf, math.inf, "the signal to quantisation noise in dB of", lambda found: found.sqnr_db
    ),
    "relative_error": ErrorKind(0, math.inf, "the relative error Σ|d| / Σ|x| of", lambda found: found.relative),
    "underflow": ErrorKind(
        0, 1, "the share of values that become zero in", lambda found: _share(found.underflows, found.count)
    ),
    "saturation": ErrorKind(
        0, 1, "the share of values beyond the largest one of", lambda found: _share(found.saturations, found.count)
    ),
    "flushed": ErrorKind(
        0, 1, "the share of values below the smallest normal one of", lambda found: _share(found.flushes, found.count)
    ),
    "scale_std": ErrorKind(
        0, math.inf, "the standard deviation of log2 of the block scales of", _scale_std,
        tuple(one for one in MEASURED_FORMATS if one not in _WITHOUT_BLOCKS),
    ),
}  # fmt: skip
