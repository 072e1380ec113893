"""Which rows of a tensor are kept: `first:K`, `stride:S` or `tokens:A-B`, along an axis that `@AXIS` names.

    first:64      the first 64 rows            first:16@1     of axis 1
    stride:8      rows 0, 8, 16, …             stride:4@-1    of the last axis
    tokens:0-127  rows 0 to 127, both kept     tokens:5-5@0   of axis 0, where the sequence comes first

Rows are those of axis 0; of `tokens`, axis -2 of three or more axes. What is cut is a view; no torch is needed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Optional, Union

import msgspec

from capd_client.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ACTIVATIONS", "Slice", "parse_slice", "parse_slices"]

ACTIVATIONS = ("input", "output", "grad_output", "grad_input")
"""The tensors with a row per token; a weight's rows are something else and are cut only by name."""

_SLICE = re.compile(
    r"(?:(?P<kind>first|stride):(?P<number>[0-9]{1,13})|tokens:(?P<first>[0-9]{1,13})-(?P<last>[0-9]{1,13}))"
    r"(?:@(?P<axis>-?[0-9]{1,2}))?"
)
_MAX_NUMBER = 10**12  # torch computes with it in 64 bits


class Slice:
    """One slice. `text` is how it was written. Raises ConfigError for anything else than the three forms."""

    __slots__ = ("_axis", "_of_tokens", "_rows", "text")

    def __init__(self, text: str) -> None:
        self.text = text.strip().lower() if isinstance(text, str) else ""
        match = _SLICE.fullmatch(self.text)
        if match is None:
            raise ConfigError(
                f'cannot read {text!r:.80} as a slice; write "first:64", "stride:8" or "tokens:0-127", and "@1" '
                "behind it for another axis"
            )
        self._axis = None if match["axis"] is None else int(match["axis"])
        self._of_tokens = match["kind"] is None
        self._rows = _rows(match)

    def __repr__(self) -> str:
        return f"Slice({self.text!r})"

    def _axis_of(self, ndim: int) -> Optional[int]:
        axis = self._axis
        if axis is None:
            axis = -2 if self._of_tokens and ndim >= 3 else 0
        return axis % ndim if -ndim <= axis < ndim else None

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is kept; the same shape where there is no such axis."""
        axis = self._axis_of(len(shape))
        if axis is None:
            return shape
        kept = len(range(*self._rows.indices(shape[axis])))
        return (*shape[:axis], kept, *shape[axis + 1 :])

    def apply(self, tensor: Tensor, metadata: str) -> tuple[Tensor, str]:
        """The kept rows as a view, and metadata (JSON object or empty) that says of what; both as they were without the
        axis. Raises ConfigError where the metadata has a `slice` of its own.
        """
        axis = self._axis_of(tensor.ndim)
        if axis is None:
            return tensor, metadata
        own = msgspec.json.decode(metadata) if metadata else {}
        if "slice" in own:
            raise ConfigError("metadata of a sliced tensor cannot have a name of capd's, slice")
        own["slice"] = {"take": self.text, "of": tuple(tensor.shape)}
        kept = tensor.detach()[(slice(None),) * axis + (self._rows,)]
        return kept, msgspec.json.encode(own).decode()


def _rows(match: re.Match[str]) -> slice:
    if match["kind"] is None:
        first, last = int(match["first"]), int(match["last"])
        if not first <= last <= _MAX_NUMBER:
            raise ConfigError(
                f"{match[0]!r}: the last token comes before the first, or is above {_MAX_NUMBER}"
            )
        return slice(first, last + 1)
    number = int(match["number"])
    if not 1 <= number <= _MAX_NUMBER:
        raise ConfigError(f"{match[0]!r}: the number is not between 1 and {_MAX_NUMBER}")
    return slice(number) if match["kind"] == "first" else slice(None, None, number)


_remembered = lru_cache(maxsize=256)(Slice)


def parse_slice(text: str) -> Slice:
    """`Slice`, remembering the texts it has seen."""
    return _remembered(text) if isinstance(text, str) else Slice(text)  # which says what a slice is


def parse_slices(slices: Union[str, Mapping[str, str]]) -> dict[str, Slice]:
    """Slices by tensor name; a plain text is for every tensor in ACTIVATIONS. Raises ConfigError as Slice does."""
    if isinstance(slices, Mapping):
        return {name: parse_slice(text) for name, text in slices.items()}
    return dict.fromkeys(ACTIVATIONS, parse_slice(slices))
