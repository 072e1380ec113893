"""The border between the job and capd. It takes the offers of hooks and of `capture()`, and stops errors of capd."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Optional, Protocol, Union

import torch

from capd_client.config.settings import ClientConfig
from capd_client.errors import COUNTED, ConfigError
from capd_client.inflight.accounts import Accounts, reason_of
from capd_client.inflight.capture import Refused
from capd_client.inflight.counters import CounterValues
from capd_client.inflight.definitions import Definition, short_name
from capd_client.inflight.policies import Drop
from capd_client.process.dynamo import untraced
from capd_client.process.log import RateLimitedLog
from capd_client.process.signals import is_interruption
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.rules.slices import Slice
from capd_client.staging.describe import Described, Offer, describe, descriptor_makers, unfit
from capd_client.staging.drop_log import DropLog
from capd_client.staging.sampling import Sampling
from capd_client.steps.context import Context
from capd_client.tensors.inspect import (
    PLAIN_TYPES,
    is_pending,
    is_tracing,
    modes_active,
    selectively_checkpointed,
    without_modes,
)
from capd_client.tensors.placements import with_placements

__all__ = ["Border", "Puts"]

_PENDING = (
    "a collective still fills it in a selectively checkpointed part, and a wait would change what torch saved"
)


class Puts(Protocol):
    """The taker of described tensors: a `Stager`, or in a plan a tally."""

    def put_known(
        self,
        tensor: torch.Tensor,
        definition: Definition,
        moment: Moment,
        cast_to: Optional[torch.dtype],
        store: Optional[str],
    ) -> bool: ...
    def put_number(self, value: float, definition: Definition, moment: Moment) -> None: ...
    def put(self, described: Described) -> None: ...
    def settle(self, described: Described, reason: DropReason) -> None: ...


class Border:
    """The part of a session that hooks need, except for devices. Never raises, except under `config.strict`.

    An error of capd costs one capture, counted as `internal`. A signal handler of the job may raise in the middle of a
    capture. This costs that capture, counted as `interrupted`, and the error reaches the job.

    Args:
        config: The settings.
        context: The position of the job.
        notices: The log.
        accounts: Counts the offers.
        stager: Takes the described tensors.
        policy: Names the consequence of a drop, for the log.
        sampling: Chooses the calls that are left out; None: no call is left out.
    """

    def __init__(
        self,
        config: ClientConfig,
        context: Context,
        notices: RateLimitedLog,
        accounts: Accounts,
        stager: Puts,
        policy: Drop,
        sampling: Optional[Sampling] = None,
    ) -> None:
        self.config = config
        self.context = context
        self.notices = notices
        self.enabled = True
        self._accounts = accounts
        self._stager = stager
        self._log = DropLog(notices, policy)
        self._sampling = sampling
        self._known = accounts.definitions.found
        self._makers = descriptor_makers(payload=config.mode != "stats")

    @untraced
    def offer(
        self,
        tensor: torch.Tensor,
        key: Key,
        moment: Moment,
        *,
        cast_to: Optional[torch.dtype] = None,
        attributes: Optional[dict[str, Any]] = None,
        metadata: str = "",
        take: Optional[Slice] = None,
        immutable: bool = False,
        store: Optional[str] = None,
    ) -> None:
        """Take one tensor with its present values. It is counted exactly once in every case.

        Args:
            tensor: A tensor of any class, dtype, layout and device. One that capd cannot keep is a counted drop.
            key: The tensor's key.
            moment: The moment of the capture.
            cast_to: The dtype to record it in (the copy casts).
            attributes: The constant attributes of the key, the same small dict every time. The attributes of a
                distributed tensor are added.
            metadata: A JSON object, or empty.
            take: The rows to record, None for all.
            immutable: Nothing writes to the tensor's memory before the capture is done. A device then needs no
                snapshot of it.
            store: The things to keep (one of `capd_client.rules.schema.STORES`); None: as the mode says.
        """
        if not self.enabled:
            return
        if self._accounts.inside():
            self._refuse_inside()
            return
        at: Union[Described, Refused, None] = None
        try:
            plain = type(tensor) in PLAIN_TYPES
            if not plain:
                attributes = with_placements(tensor, attributes)
            elif self._sampling is None and take is None and not metadata and tensor.is_cpu:
                dtype = tensor.dtype if cast_to is None else cast_to
                known = self._known.get((id(key), dtype, id(attributes)))
                # During a trace, the numbers of elements are tensors.
                if (
                    known is not None
                    and not is_tracing()
                    and self._stager.put_known(tensor, known, moment, cast_to, store)
                ):
                    return
            whole = Offer(tensor, key, moment, cast_to, attributes, metadata, take, immutable, store)
            left_out = None if self._sampling is None else self._sampling.left_out(whole)
            if left_out is not None:
                at = left_out
                self._accounts.refuse(left_out)
                return
            if not modes_active():
                for at in describe(whole, self._accounts.define, self._makers):
                    self._take(at)
            elif is_pending(tensor) and selectively_checkpointed():
                at = unfit(whole, _PENDING)
                self._take(at)
            else:
                with without_modes():
                    for at in describe(whole, self._accounts.define, self._makers):
                        self._take(at)
        except BaseException as error:
            self._broken(error, at)

    @untraced
    def offer_scalar(self, value: Union[float, torch.Tensor], key: Key, moment: Moment) -> None:
        """Take one number. It is kept in every mode and never sampled, and never waits for room.

        Args:
            value: A float, or a device tensor of shape ().
            key: The key of the scalar (`capd_client.protocol.scalars.scalar_key`), the same object every time.
            moment: The moment of the scalar.
        """
        if not self.enabled:
            return
        if self._accounts.inside():
            self._refuse_inside()
            return
        at: Union[Described, Refused, None] = None
        try:
            if isinstance(value, float):
                definition = self._known.get((id(key), torch.float64, id(None)))
                definition = definition or self._accounts.define(key, torch.float64, None)
                self._stager.put_number(value, definition, moment)
                return
            offer = Offer(value, key, moment, cast_to=torch.float64, store="full")
            with without_modes() if modes_active() else nullcontext():
                for at in describe(offer, self._accounts.define, self._makers):
                    self._take(at)
        except ConfigError as error:
            self.drop_invalid(str(error))
        except BaseException as error:
            self._broken(error, at)

    def _take(self, one: Union[Described, Refused]) -> None:
        if isinstance(one, Refused):
            self._accounts.refuse(one)
            self._log.unfit(one)
        else:
            self._stager.put(one)

    def _broken(self, error: BaseException, at: Union[Described, Refused, None]) -> None:
        """Count the capture that an error ended, unless it is counted already. Log the error, or raise it."""
        if isinstance(at, Described):
            self._stager.settle(at, reason_of(error))
        elif not (getattr(error, COUNTED, False) or (at is not None and at.counted)):
            self._accounts.refuse(Refused(reason_of(error)))
        self._hand_on("a capture", error)

    def _refuse_inside(self) -> None:
        """Drop the capture of a signal handler that interrupted this very thread inside the queue."""
        self._accounts.refuse_inside(DropReason.INTERRUPTED)
        self.notices.warn(
            DropReason.INTERRUPTED.value,
            "a capture in a signal handler is dropped: the signal came in the middle of another one",
        )

    def keeps(self, moment: Moment) -> bool:
        """Return whether mode and policy keep the captures of this call. The captures of other calls are drops."""
        return self._sampling is None or self._sampling.refusal(moment) is None

    def quant_type(self, dtype: torch.dtype) -> str:
        """Return the label of a capture without one: the configured label, else the dtype's short name."""
        return self.config.quant_type or short_name(dtype)

    def drop_internal(self, where: str, error: BaseException) -> None:
        """Count a capture that an error inside capd prevented, and log the error.

        Raises the error under CAPD_STRICT=1. An error of a job's signal handler is always raised.
        """
        if self.enabled and not getattr(error, COUNTED, False):
            self._refuse(Refused(reason_of(error)))
        self._hand_on(where, error)

    def drop_invalid(self, problem: str, reason: DropReason = DropReason.INVALID_KEY) -> None:
        """Count a capture whose arguments cannot be used, and log the problem."""
        if self.enabled:
            self._refuse(Refused(reason))
            self.notices.warn(reason.value, "a capture was not taken: %s", problem)

    def snapshot(self) -> CounterValues:
        """Return the counters at this instant."""
        return self._accounts.snapshot()

    def _refuse(self, refused: Refused) -> None:
        """Count a capture that ended before it was offered."""
        if self._accounts.inside():
            self._accounts.refuse_inside(refused.reason)
        else:
            self._accounts.refuse(refused)

    def _hand_on(self, where: str, error: BaseException) -> None:
        """Log the error of a counted capture, or raise it. Taps on its way must not count it again."""
        if self.config.strict or is_interruption(error):
            setattr(error, COUNTED, True)
            raise error from None
        if self.enabled:
            name = type(error).__name__
            self.notices.warn(DropReason.INTERNAL.value, "%s failed inside capd: %s: %s", where, name, error)
