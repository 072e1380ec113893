"""Where and when this process is: its rank, and the moment (iteration, micro-batch, sample) it has reached.

The moment moves on by itself: an optimizer step marks the iteration as finished, the next training forward of a
watched root (or the next capture outside one) begins a new one, every further forward of a root begins a
micro-batch. While a framework counts (`follow`), its numbers stand in the place of that. What `set_moment` sets wins
over both and stays until it is set again.
"""

from __future__ import annotations

import logging
import operator
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Optional, TypeVar

import torch

from capd_client.errors import ConfigError
from capd_client.process.ranks import RankInfo, distributed_ready, find_rank
from capd_client.protocol.key import MAX_INDEX, Moment

__all__ = ["MOMENT_FIELDS", "Context", "Counter", "as_index"]

logger = logging.getLogger("capd_client")

MOMENT_FIELDS = ("iteration", "micro_batch", "sample_idx", "batch_idx", "sequence_idx")
Counter = Callable[
    [], tuple[Optional[int], Optional[int]]
]  # iteration and micro-batch; None: it does not know
_Owned = TypeVar("_Owned")
_REMEMBERED = 64  # micro-batches whose call ordinals are remembered


def as_index(name: str, value: Any) -> int:
    """`value` as a plain int in 0 … 2**63-1; raises ConfigError for anything else.

    A tensor on a device is refused: reading it would wait for the device.
    """
    if type(value) is int and 0 <= value <= MAX_INDEX:  # nearly always: the rest takes several times as long
        return value
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        raise ConfigError(
            f"{name} is a tensor on {value.device}; pass a Python int (reading it would synchronise)"
        )
    try:
        index = operator.index(value)
    except (TypeError, RuntimeError):
        raise ConfigError(f"{name}={value!r:.80} is not an integer") from None
    if not 0 <= index <= MAX_INDEX:
        raise ConfigError(f"{name}={index} is not between 0 and 2**63-1")
    return index


class Context:
    """Rank and moment state of one session. One training thread moves it on; any thread may read it.

    Args:
        iteration: where the counting starts.
        sample_idx: the sample that the first captures carry.
        environ: the variables that tell the rank, default os.environ.
        on_rank_change: called when torch.distributed gives the process another rank.
        on_iteration: called with the number of an iteration that begins; nothing of it is captured yet.
        on_endless: called with a reason when the current iteration seems to have no end.
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
        self.dirty = True  # the iteration is to begin: it is the first, or an optimizer has stepped
        self._first = True  # no iteration has begun yet
        self._reached = -1  # the iteration that began last, or was named by a capture since
        self._fresh = True  # no root forward has run in this micro-batch yet
        self.counted = False  # a framework counts the micro-batches: root forwards do not
        self.evaluating = False  # in a forward that trains nothing, though its root is in training mode
        self._counter: Optional[Counter] = None
        self._told = -1  # the framework's iteration that was read last
        self._offset = 0  # of its micro-batches: those of this iteration that it knows nothing of
        self._own = False  # the forward of a root is under way that no framework counts
        self._environ = environ
        self._info = find_rank(environ)
        self._bound = False
        self._follows = self._info.source == "torch.distributed"
        self._on_rank_change = on_rank_change
        self._on_iteration = on_iteration
        self._on_endless = on_endless
        self._owned: dict[type, Any] = {}
        self._ordinals: OrderedDict[tuple[int, int], dict[object, count[int]]] = OrderedDict()
        # Of these, the last: its moment, and its counters.
        self._counting: tuple[tuple[int, int], dict[object, count[int]]] = ((-1, -1), {})

    def owned(self, kind: type[_Owned], make: Callable[[], _Owned]) -> _Owned:
        """The one object of this class that belongs to the context, made by the first call.

        It lives as long as the context. A weak dictionary would not do: these objects refer to their context, and
        would keep it, and themselves, for good.
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
        """Whether the job says itself which iteration this is (`set_moment`)."""
        return "iteration" in self._manual

    @property
    def rank_info(self) -> RankInfo:
        """Rank, sizes and attempt; follows torch.distributed once that is initialised, and says so once."""
        if not self._follows and distributed_ready():
            self._follow()
        return self._info

    def bind(self) -> int:
        """The rank to put on a capture; from the first one on a change of rank is worth a log line."""
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
        """Set any of iteration, micro_batch, sample_idx, batch_idx, sequence_idx; None hands one back.

        A new iteration restarts the micro-batches at 0 unless micro_batch is given too. Raises ConfigError
        for unknown names or values that are no indices, and then changes nothing.
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
        """A framework begins a micro-batch and counts until further notice; None: it counts no longer.

        `counter` is asked now, and again in the first forward after every optimizer step. What it does not know
        goes on being counted here.
        """
        self._counter = counter
        if counter is None:
            self.counted = False
        else:
            self._read(counter)

    def _read(self, counter: Counter) -> None:
        iteration, micro_batch = counter()
        self.counted = micro_batch is not None
        own = self.iteration_is_set
        if self.dirty if iteration is None else iteration != self._told:
            self._told = -1 if iteration is None else iteration
            if own:  # what the job calls one iteration may be several of the framework's
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
        """A watched root starts a training forward."""
        self.begin_if_dirty()
        if self.counted:
            return
        if not self._fresh and "micro_batch" not in self._manual:
            self.micro_batch += 1
        self._fresh = False
        self._own = True

    def end_forward(self) -> None:
        """The forward of a watched root is over. A framework may have counted it inside, as DeepSpeed's engine does."""
        if self._own:
            self._own = False
            self._offset += 1

    def begin_if_dirty(self) -> None:
        """Something is captured outside a root's forward: it belongs to a new iteration if one is due."""
        if not self.dirty:
            return
        if self._counter is None:
            self._next_iteration()
        else:
            self._read(self._counter)

    def optimizer_stepped(self) -> None:
        """An optimizer has stepped: what comes next belongs to the next iteration."""
        self.dirty = True
        self._first = False
        self.evaluating = False  # where one ended without a word

    def seems_endless(self, reason: str) -> None:
        """The current iteration seems to have no end."""
        self._on_endless(reason)

    def reach(self, iteration: int) -> None:
        """A capture names its own iteration; in a job that captures only so, that is how iterations begin."""
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
        if self.iteration_is_set:  # the job counts: further forwards stay its micro-batches
            if "micro_batch" not in self._manual:
                self.micro_batch += 1
            return
        self.iteration += 1
        self._offset = 0
        if "micro_batch" not in self._manual:
            self.micro_batch = 0
        self._begin()

    def moment(self, *, call: int = 0, recompute: bool = False) -> Moment:
        """The current moment, stamped with the wall clock."""
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
        """Another moment of this process, stamped with the wall clock, too."""
        attempt = self._info.attempt
        return Moment(
            iteration, micro_batch, call, sample_idx, batch_idx, sequence_idx, attempt, time.time_ns()
        )

    def next_call(self, identity: object, iteration: int, micro_batch: int) -> int:
        """How often `identity` was counted before in this micro-batch: 0, 1, 2, … (explicit captures).

        No two threads get the same: each of the steps below is one of the interpreter.
        """
        moment, calls = self._counting
        if moment[0] != iteration or moment[1] != micro_batch:
            calls = self._ordinals.setdefault((iteration, micro_batch), {})
            self._counting = ((iteration, micro_batch), calls)
            if len(self._ordinals) > _REMEMBERED:
                self._ordinals.popitem(last=False)
        counter = calls.get(identity)
        if counter is None:
            counter = calls.setdefault(identity, count())
        return next(counter)
