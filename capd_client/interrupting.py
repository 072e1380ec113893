"""Captures of a signal handler that interrupted this very thread inside of the books: drops, counted right after."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch

from capd_client.books import Books
from capd_client.counter_page import DropReason
from capd_client.errors import ConfigError
from capd_client.key import Key, Moment
from capd_client.notices import Notices
from capd_client.slicing import Slice
from capd_client.tensors import PLAIN_TYPES

__all__ = ["Interrupting", "numel_of"]


class Interrupting:
    """Refuses what `Books.inside` says cannot be taken: slots and counters are half changed under the handler."""

    def __init__(self, books: Books, notices: Notices) -> None:
        self._books = books
        self._notices = notices

    def refuse(
        self,
        tensor: torch.Tensor,
        key: Key,
        moment: Moment,
        cast_to: Optional[torch.dtype],
        attributes: Optional[dict[str, Any]],
        take: Optional[Slice],
    ) -> None:
        """Have the capture counted as `internal`; arguments as for `Session.offer`. The tensor is not held."""
        dtype = tensor.dtype if cast_to is None else cast_to
        numel = numel_of(tensor, take)

        def count() -> None:
            try:
                definition = self._books.define(key, dtype, attributes)
            except ConfigError:
                self._books.refuse(None, DropReason.INVALID_KEY)
                return
            nbytes = numel * definition.item_nbytes
            self._books.refuse(definition, DropReason.INTERNAL, nbytes, moment.iteration)

        self._books.later(count)
        self._notices.warn(
            "interrupting",
            "a capture in a signal handler is dropped: the signal came in the middle of another one",
        )


def numel_of(tensor: torch.Tensor, take: Optional[Slice]) -> int:
    """Elements of what would be recorded; 0 where they are known only once the tensor is unwrapped."""
    if type(tensor) not in PLAIN_TYPES:
        return 0
    return tensor.numel() if take is None else math.prod(take.shape_of(tensor.shape))
