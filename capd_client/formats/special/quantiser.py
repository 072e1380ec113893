"""The interface of a special quantiser, and its choice by the options of a format."""

from __future__ import annotations

from typing import NamedTuple, Optional, Protocol

import torch

from capd_client.formats.spec import Block, FormatError, Spec

__all__ = ["SpecialQuantiser", "SpecialRows", "no_codes"]


class SpecialRows(NamedTuple):
    """Quantised rows.

    Attributes:
        found: The values after quantising and dequantising, float32 in the shape of the rows.
        amax: The largest magnitude of each block, float32 [blocks, 1]; None if the scale does not depend on it.
        after: The multiplier of the decoded elements of each block, float32 [blocks, 1].
        codes: The codes of the elements, uint8 in the shape of the rows; None if the format keeps none.
        stored: The scales as `Encoded` stores them, [blocks, 1].
    """

    found: torch.Tensor
    amax: Optional[torch.Tensor]
    after: torch.Tensor
    codes: Optional[torch.Tensor]
    stored: torch.Tensor


class SpecialQuantiser(Protocol):
    """The quantiser of one tensor, made once per tensor after a look at all of it."""

    @property
    def block(self) -> Block:
        """The block of the rows that it takes: a whole number of the format's blocks."""

    @property
    def global_scale(self) -> Optional[torch.Tensor]:
        """The scale of the whole tensor that decoding needs, float32 []."""

    def quantised(
        self, rows: torch.Tensor, generator: Optional[torch.Generator], *, codes: bool = False
    ) -> SpecialRows:
        """Quantise rows, float32 [n, values of `block`]. With `codes`, return the codes, too."""


def no_codes(spec: Spec, option: str) -> FormatError:
    """Return the error for a format whose codes cannot be stored."""
    return FormatError(f"{spec.fmt} with {option} has no stored form; use qdq, which returns the values")
