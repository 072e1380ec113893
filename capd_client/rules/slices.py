"""Slices keep some rows of a tensor: `first:K`, `stride:S` or `tokens:A-B`, along an axis that `@AXIS` names.

    first:64      the first 64 rows            first:16@1     of axis 1
    stride:8      rows 0, 8, 16, …             stride:4@-1    of the last axis
    tokens:0-127  rows 0 to 127, both kept     tokens:5-5@0   of axis 0, where the sequence comes first

The default is axis 0; for `tokens`, it is axis -2 of three or more axes. A slice is a
view. This module imports no torch.
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
"""The tensors with a row per token. The rows of a weight differ, so a weight is sliced only if it is named."""

_SLICE = re.compile(
    r"(?:(?P<kind>first|stride):(?P<number>[0-9]{1,13})|tokens:(?P<first>[0-9]{1,13})-(?P<last>[0-9]{1,13}))"
    r"(?:@(?P<axis>-?[0-9]{1,2}))?"
)
# torch computes with it in 64 bits.
_MAX_NUMBER = 10**12


class Slice:
    """One slice. `text` is its text, in lower case. Raises ConfigError for anything but the three forms."""

    __slots__ = ("_axis", "_of_tokens", "_rows", "text")

    def __init__(self, text: str) -> None:
        self.text = text.strip().lower() if isinstance(text, str) else ""
        match = _SLICE.fullmatch(self.text)
        if match is None:
            raise ConfigError(
                f'cannot read {text!r:.80} as a slice; write "first:64", "stride:8" or "tokens:0-127", and "@1" '
                "after it for another axis"
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
        """Return the shape of the kept rows; `shape` itself if it lacks the axis."""
        axis = self._axis_of(len(shape))
        if axis is None:
            return shape
        kept = len(range(*self._rows.indices(shape[axis])))
        return (*shape[:axis], kept, *shape[axis + 1 :])

    def apply(self, tensor: Tensor, metadata: str) -> tuple[Tensor, str]:
        """Return the kept rows as a view, and the metadata with a note of the slice and the whole shape.

        A tensor without the axis is returned unchanged, and so is its metadata.

        Args:
            tensor: Any tensor.
            metadata: A JSON object as text, or the empty string.

        Raises:
            ConfigError: The metadata has its own `slice`.
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
    """Return the `Slice` of a text, from a cache of recent ones."""
    # A value that is no text cannot be a key of the cache. Slice raises the error about it.
    return _remembered(text) if isinstance(text, str) else Slice(text)


def parse_slices(slices: Union[str, Mapping[str, str]]) -> dict[str, Slice]:
    """Return slices by tensor name; one text applies to all of ACTIVATIONS. Raises ConfigError as Slice does."""
    if isinstance(slices, Mapping):
        return {name: parse_slice(text) for name, text in slices.items()}
    return dict.fromkeys(ACTIVATIONS, parse_slice(slices))
