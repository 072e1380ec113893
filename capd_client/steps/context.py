"""The context of a session: the rank of the process, and its present moment (iteration, micro-batch, sample).

The moment advances automatically. An optimizer step marks the iteration as finished. The next training forward of a
watched root, or the next capture outside one, begins a new iteration. Every further forward of a root begins a
micro-batch. While a framework counts (`follow`), its numbers replace this count. A value of `set_moment` replaces both
and stays until it is set again.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Any, Optional, TypeVar

import torch

from capd_client.errors import ConfigError
from capd_client.process.ranks import RankInfo, distributed_ready, find_rank
from capd_client.process.text import brief
from capd_client.protocol.key import MAX_INDEX, Moment
from capd_client.steps.call_numbers import CallNumbers
from capd_client.steps.checkpointing import in_backward

__all__ = ["MOMENT_FIELDS", "Context", "Counter", "as_index"]

logger = logging.getLogger("capd_client")

MOMENT_FIELDS = ("iteration", "micro_batch", "sample_idx", "batch_idx", "sequence_idx")
# Returns iteration and micro-batch. None: unknown.
Counter = Callable[[], tuple[Optional[int], Optional[int]]]
_Owned = TypeVar("_Owned")


def as_index(name: str, value: Any) -> int:
    """Return `value` as a plain int in 0 … 2**63-1.

    Raises:
        ConfigError: The value is anything else. A tensor on a device is refused, because its read would wait for the
            device.
    """
    # Nearly always true, and the rest takes several times as long.
    if type(value) is int and 0 <= value <= MAX_INDEX:
        return value
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        raise ConfigError(
            f"{name} is a tensor on {value.device}; pass a Python int (reading it would synchronise)"
        )
    try:
        index = operator.index(value)
    except (TypeError, RuntimeError):
        raise ConfigError(f"{name} must be an integer, not {brief(value)}") from None
    if not 0 <= index <= MAX_INDEX:
        raise ConfigError(f"{name}={index} is not between 0 and 2**63-1")
    return index


class Context:
    """The rank and moment of one session. One training thread changes it; any thread may read it.

    Args:
        iteration: The first iteration.
        sample_idx: The sample of the first captures.
        environ: The variables with the rank, default os.environ.
        on_rank_change: Called when torch.distributed gives the process another rank.
        on_iteration: Called with the number of an iteration that begins, before its first capture.
        on_endless: Called with a reason when the current iteration seems to have no end.
    """

    def __init__(
        self,
        *,
        iteration: int = 0,
        sample_idx: Optional[int] = None,
        environ: Optional[Mapping[str, str]] = None,
        on_rank_change: Callable[[], None] = lambda: None,
        on_iteration: Callable[[int], None] = lambda _: None,
        on_endless: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.iteration = iteration
        self.micro_batch = 0
        self.sample_idx = sample_idx
        self.batch_idx: Optional[int] = None
        self.sequence_idx: Optional[int] = None
        self._manual: set[str] = set()
        # Whether a new iteration must begin: it is the first, or an optimizer has stepped.
        self.dirty = True
        # Whether no iteration has begun yet.
        self._first = True
        # The iteration that began last, or that a capture has named since.
        self._reached = -1
        # Whether no root forward has run in this micro-batch yet.
        self._fresh = True
        # Whether a framework counts the micro-batches, instead of root forwards.
        self.counted = False
        # Whether the forward under way trains nothing, though its root is in training mode.
        self.evaluating = False
        self._counter: Optional[Counter] = None
        # The framework's iteration that was read last.
        self._last_read = -1
        # The micro-batches of this iteration that the framework does not know. They are added to its numbers.
        self._offset = 0
        # Whether a root forward is under way that no framework counts.
        self._own = False
        # Whether forwards of roots, or a framework, begin the iterations.
        self._by_forwards = False
        # The thread in which an optimizer stepped last.
        self._stepped_by: Optional[int] = None
        self._environ = environ
        self._info = find_rank(environ)
        self._bound = False
        self._follows = self._info.source == "torch.distributed"
        self._on_rank_change = on_rank_change
        self._on_iteration = on_iteration
        self.on_endless = on_endless
        self._owned: dict[type, Any] = {}
        self.calls = CallNumbers()

    def owned(self, kind: type[_Owned], make: Callable[[], _Owned]) -> _Owned:
        """Return the one object of this class that belongs to the context. The first call makes it.

        The object lives as long as the context. A weak dictionary cannot do this. Its values refer to their context,
        so they would keep the context and themselves alive forever.

        Args:
            kind: The class.
            make: Makes the object.
        """
        found = self._owned.get(kind)
        if found is None:
            found = self._owned.setdefault(kind, make())
        made: _Owned = found
        return made

    @property
    def rank(self) -> int:
        """Global rank, 0-based."""
        return self.rank_info.rank

    @property
    def iteration_is_set(self) -> bool:
        """Whether the job itself sets the iteration (`set_moment`)."""
        return "iteration" in self._manual

    @property
    def reached(self) -> Optional[int]:
        """The iteration that began last, or that a capture has named since; None before the first."""
        return None if self._reached < 0 else self._reached

    @property
    def rank_info(self) -> RankInfo:
        """The rank, the sizes and the attempt. They follow torch.distributed after its initialisation."""
        if not self._follows and distributed_ready():
            self._follow()
        return self._info

    def bind(self) -> int:
        """Return the rank for a capture. After the first capture, a change of rank is logged."""
        if not self._follows and distributed_ready():
            self._follow()
        self._bound = True
        return self._info.rank

    def _follow(self) -> None:
        before, self._info = self._info, find_rank(self._environ)
        self._follows = True
        if before.rank != self._info.rank:
            self._on_rank_change()
        if self._bound and before.rank != self._info.rank:
            logger.warning(
                "capd: torch.distributed was initialised after the first capture: rank %d (%s) is rank %d from now on",
                before.rank,
                before.source,
                self._info.rank,
            )

    def set_moment(self, **values: Any) -> None:
        """Set any of iteration, micro_batch, sample_idx, batch_idx, sequence_idx; None unsets a field.

        A new iteration restarts the micro-batches at 0, unless micro_batch is given as well.

        Raises:
            ConfigError: A name is unknown or a value is no index. Then nothing has changed.
        """
        for name in values:
            if name not in MOMENT_FIELDS:
                raise ConfigError(f"set_moment has no field {name!r}; fields: {', '.join(MOMENT_FIELDS)}")
        indices = {n: None if v is None else as_index(n, v) for n, v in values.items()}
        self._set_iteration(indices)
        micro_batch = indices.get("micro_batch")
        if micro_batch is not None:
            self.micro_batch = micro_batch
            self._manual.add("micro_batch")
        elif "micro_batch" in indices:
            self._manual.discard("micro_batch")
        for name in ("sample_idx", "batch_idx", "sequence_idx"):
            if name in indices:
                setattr(self, name, indices[name])

    def _set_iteration(self, indices: Mapping[str, Optional[int]]) -> None:
        if "iteration" not in indices:
            return
        iteration = indices["iteration"]
        if iteration is None:
            self._manual.discard("iteration")
            return
        self._manual.add("iteration")
        if iteration != self.iteration:
            self.iteration = iteration
            self.micro_batch = 0
            self._manual.discard("micro_batch")
            self._fresh = True
            self.dirty = False
            self._offset = 0
            self._begin()

    def follow(self, counter: Optional[Counter]) -> None:
        """Follow a framework that begins a micro-batch and counts from now on; None: it does not count any longer.

        `counter` is called now, and again in the first forward after every optimizer step. A number that it does not
        know is counted here.
        """
        self._counter = counter
        if counter is None:
            self.counted = False
        else:
            self._by_forwards = True
            self._read(counter)

    def _read(self, counter: Counter) -> None:
        iteration, micro_batch = counter()
        self.counted = micro_batch is not None
        own = self.iteration_is_set
        if self.dirty if iteration is None else iteration != self._last_read:
            self._last_read = -1 if iteration is None else iteration
            # One iteration of the job may be several iterations of the framework.
            if own:
                self._offset = 0 if self._fresh else self.micro_batch + 1
        if iteration is None or own:
            if self.dirty:
                self._next_iteration()
        elif self._first or iteration != self.iteration:
            self.iteration = iteration
            self._fresh, self.dirty = True, False
            self._offset = 0
            if "micro_batch" not in self._manual:
                self.micro_batch = 0
            self._begin()
        if micro_batch is not None:
            self._fresh = self._own = False
            if "micro_batch" not in self._manual:
                self.micro_batch = micro_batch + self._offset

    def begin_micro_batch(self) -> None:
        """Begin a training forward of a watched root."""
        self._by_forwards = True
        self.begin_if_dirty()
        if self.counted:
            return
        if not self._fresh and "micro_batch" not in self._manual:
            self.micro_batch += 1
        self._fresh = False
        self._own = True

    def end_forward(self) -> None:
        """End the forward of a watched root. A framework may have counted it inside, as DeepSpeed's engine does."""
        if self._own:
            self._own = False
            self._offset += 1

    def begin_if_dirty(self) -> None:
        """Begin a new iteration if one is due, for a capture outside a root's forward."""
        if not self.dirty:
            return
        if self._counter is None:
            self._next_iteration()
        else:
            self._read(self._counter)

    def begin_for_scalar(self, identity: object) -> None:
        """Begin a new iteration if one is due and nothing else would begin it.

        Loops log a loss before or after the optimizer steps. So after a step, the first scalar of a name in an
        iteration ends it, and the second one begins the next, unless forwards of roots begin the iterations.
        Scalars of other threads, such as a monitor's, begin none.

        Args:
            identity: The scalar, as in `CallNumbers.next`.
        """
        if self._stepped_by not in (None, get_ident()):
            return
        if self._first or (not self._by_forwards and self.calls.has(identity, self.iteration)):
            self.begin_if_dirty()

    def forwards_end(self) -> None:
        """Note that no root is watched any more. Scalars begin the iterations from now on."""
        self._by_forwards = False

    def optimizer_stepped(self) -> None:
        """Note a step of an optimizer. The next forward or capture belongs to the next iteration."""
        self.dirty = True
        self._first = False
        # Autograd's threads run no code of the loop.
        self._stepped_by = None if in_backward() else get_ident()
        # An evaluation may have ended without notice.
        self.evaluating = False

    def reach(self, iteration: int) -> None:
        """Note the iteration that a capture names. If all captures of a job do so, iterations begin this way."""
        if iteration > self._reached:
            self._reached = iteration
            self._on_iteration(iteration)

    def _begin(self) -> None:
        self._first = False
        self._reached = self.iteration
        self._on_iteration(self.iteration)

    def _next_iteration(self) -> None:
        self.dirty = False
        if self._first:
            self._begin()
            return
        self._fresh = True
        # The job sets its iterations, so further forwards are micro-batches of the present one.
        if self.iteration_is_set:
            if "micro_batch" not in self._manual:
                self.micro_batch += 1
            return
        self.iteration += 1
        self._offset = 0
        if "micro_batch" not in self._manual:
            self.micro_batch = 0
        self._begin()

    def moment(self, *, call: int = 0, recompute: bool = False) -> Moment:
        """Return the current moment, stamped with the wall clock."""
        return Moment(
            self.iteration,
            self.micro_batch,
            call,
            self.sample_idx,
            self.batch_idx,
            self.sequence_idx,
            self._info.attempt,
            time.time_ns(),
            recompute,
        )

    def moment_at(
        self,
        iteration: int,
        micro_batch: int,
        call: int,
        sample_idx: Optional[int],
        batch_idx: Optional[int],
        sequence_idx: Optional[int],
    ) -> Moment:
        """Return another moment of this process, stamped with the wall clock."""
        attempt = self._info.attempt
        return Moment(
            iteration, micro_batch, call, sample_idx, batch_idx, sequence_idx, attempt, time.time_ns()
        )
