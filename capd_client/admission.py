"""In front of the stager: leaves out the captures of calls that mode `sample:1/N` or policy `thin` does not keep.

A call is one moment: (iteration, micro-batch, call). What belongs together (X, W, Y, dY) stays together, under
sampling on every rank alike. What is left out is counted and costs nothing besides: no copy, no slot, no wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch

from capd_client.books import Books
from capd_client.counter_page import DropReason
from capd_client.errors import ConfigError
from capd_client.interrupting import numel_of
from capd_client.key import Key, Moment
from capd_client.slicing import Slice

__all__ = ["Admission"]


class Admission:
    """Stages the calls that are kept and counts the others as `sampled` or `thinned`.

    stage: `Stager.stage`. sample_every: N; kept is where (iteration + micro_batch + call) mod N == 0. Of these, the
    books' `thinning` keeps all or fewer.
    """

    def __init__(self, books: Books, stage: Callable[..., None], sample_every: int) -> None:
        self._books = books
        self._thinning = books.thinning
        self._stage = stage
        self._sample_every = sample_every

    def refusal(self, moment: Moment) -> Optional[DropReason]:
        """Why the captures of this call are left out, None where they are kept."""
        if (moment.iteration + moment.micro_batch + moment.call) % self._sample_every:
            return DropReason.SAMPLED
        if self._thinning is not None:
            with self._books.lock:
                if not self._thinning.keeps(moment):
                    return DropReason.THINNED
        return None

    def stage(
        self,
        tensor: torch.Tensor,
        key: Key,
        moment: Moment,
        cast_to: Optional[torch.dtype],
        attributes: Optional[dict[str, Any]],
        metadata: str,
        take: Optional[Slice] = None,
        immutable: bool = False,
        store: Optional[str] = None,
    ) -> None:
        """As `Stager.stage`, for the calls that are kept."""
        reason = self.refusal(moment)
        if reason is None:
            self._stage(tensor, key, moment, cast_to, attributes, metadata, take, immutable, store)
            return
        try:
            definition = self._books.define(key, tensor.dtype if cast_to is None else cast_to, attributes)
        except ConfigError:  # a key that cannot be kept is refused at every moment
            self._stage(tensor, key, moment, cast_to, attributes, metadata, take, immutable, store)
            return
        nbytes = numel_of(tensor, take) * definition.item_nbytes
        self._books.refuse(definition, reason, nbytes, moment.iteration)
