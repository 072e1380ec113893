"""The ranges of the number formats that rules and the live page name, without torch.

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
        normal_exponent: The smallest normal value is 2 to this power.
        smallest_exponent: The smallest value above 0 is 2 to this power.
    """

    largest: float
    normal_exponent: int
    smallest_exponent: int

    @property
    def normal(self) -> float:
        """The smallest normal value."""
        return 2.0**self.normal_exponent

    @property
    def smallest(self) -> float:
        """The smallest value above 0."""
        return 2.0**self.smallest_exponent

    @property
    def first_exponent_above(self) -> int:
        """The smallest E for which all values of at least 2^E are above the largest value."""
        return math.frexp(self.largest)[1]


FORMAT_RANGES = {
    "e4m3": FormatRange(448.0, -6, -9),
    "e5m2": FormatRange(57344.0, -14, -16),
    "e3m2": FormatRange(28.0, -2, -4),
    "e2m3": FormatRange(7.5, 0, -3),
    "e2m1": FormatRange(6.0, 0, -1),
    "fp16": FormatRange(65504.0, -14, -24),
    "hifp8": FormatRange(2.0**15, -15, -22),
    "bf16": FormatRange(float(0xFF << 120), -126, -133),
}

ELEMENTS_OF = {
    "fp8": ("e4m3", "e5m2"),
    "mxfp8": ("e4m3", "e5m2"),
    "mxfp6": ("e2m3", "e3m2"),
    "mxfp4": ("e2m1",),
    "nvfp4": ("e2m1",),
}
"""The elements of formats with scales, for the message about them."""
