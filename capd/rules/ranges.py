"""The ranges of the number formats that rules name, without torch: largest value, smallest value above 0.

A format that has scales has no range of its own; its elements have one. The tests compare this table with the
definitions in `capd_client.formats`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["ELEMENTS_OF", "FORMAT_RANGES", "FormatRange"]


class FormatRange(NamedTuple):
    """The range of a format without a scale.

    Attributes:
        largest: The largest finite value.
        smallest_exponent: The smallest value above 0 is 2 to this power.
    """

    largest: float
    smallest_exponent: int

    @property
    def first_exponent_above(self) -> int:
        """The smallest E for which all values of at least 2^E are above the largest value."""
        return math.frexp(self.largest)[1]


FORMAT_RANGES = {
    "e4m3": FormatRange(448.0, -9),
    "e5m2": FormatRange(57344.0, -16),
    "e3m2": FormatRange(28.0, -4),
    "e2m3": FormatRange(7.5, -3),
    "e2m1": FormatRange(6.0, -1),
    "fp16": FormatRange(65504.0, -24),
    "hifp8": FormatRange(2.0**15, -22),
    "bf16": FormatRange(float(0xFF << 120), -133),
}

ELEMENTS_OF = {
    "fp8": ("e4m3", "e5m2"),
    "mxfp8": ("e4m3", "e5m2"),
    "mxfp6": ("e2m3", "e3m2"),
    "mxfp4": ("e2m1",),
    "nvfp4": ("e2m1",),
}
"""The elements of formats with scales, for the message about them."""
