"""The sampling before the description: leaves out calls that mode `sample:1/N` or policy `thin` does not keep.

A call is one moment: (iteration, micro-batch, call). All tensors of a call (X, W, Y, dY) are kept or left out
together. Mode `sample` chooses the same calls on every rank. A tensor left out costs only its count: no copy, no
slot, no wait.
"""

from __future__ import annotations

import math
from typing import Optional

import torch

from capd_client.errors import ConfigError
from capd_client.inflight.accounts import Accounts
from capd_client.inflight.capture import Refused
from capd_client.inflight.thinning import Thinning
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Moment
from capd_client.rules.slices import Slice
from capd_client.staging.describe import Offer
from capd_client.tensors.inspect import PLAIN_TYPES

__all__ = ["Sampling"]


class Sampling:
    """The choice of calls that are left out, as `sampled` or `thinned`.

    Args:
        accounts: Defines the tensors, and has the lock for `thinning`.
        sample_every: N. A call is kept if (iteration + micro_batch + call) mod N == 0.
        thinning: Keeps all or fewer of these calls; None: keeps all.
    """

    def __init__(self, accounts: Accounts, sample_every: int, thinning: Optional[Thinning]) -> None:
        self._accounts = accounts
        self._sample_every = sample_every
        self._thinning = thinning

    def refusal(self, moment: Moment) -> Optional[DropReason]:
        """Return the reason why the captures of this call are left out, or None if they are kept."""
        if (moment.iteration + moment.micro_batch + moment.call) % self._sample_every:
            return DropReason.SAMPLED
        if self._thinning is not None:
            with self._accounts.lock:
                if not self._thinning.keeps(moment):
                    return DropReason.THINNED
        return None

    def left_out(self, offer: Offer) -> Optional[Refused]:
        """Return the refusal of an offer whose call is left out, or None if it is kept."""
        reason = self.refusal(offer.moment)
        if reason is None:
            return None
        dtype = offer.tensor.dtype if offer.cast_to is None else offer.cast_to
        try:
            definition = self._accounts.define(offer.key, dtype, offer.attributes)
        except ConfigError:
            # The key cannot be kept at any moment. The description refuses it.
            return None
        nbytes = _numel_of(offer.tensor, offer.take) * definition.item_nbytes
        return Refused(reason, definition, nbytes, offer.moment.iteration)


def _numel_of(tensor: torch.Tensor, take: Optional[Slice]) -> int:
    """Return the number of elements to record; 0 if only an unwrapped tensor would show it."""
    if type(tensor) not in PLAIN_TYPES:
        return 0
    return tensor.numel() if take is None else math.prod(take.shape_of(tensor.shape))
