"""Where taps put their captures while a job is planned: each is described, counted, and forgotten."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Optional

import msgspec
import torch

from capd_client.accounts import Accounts
from capd_client.config import ClientConfig
from capd_client.context import Context
from capd_client.counter_page import DropReason
from capd_client.counting import Counters
from capd_client.cuda import is_capturing, ring_sizes
from capd_client.definitions import Definition, short_name
from capd_client.describing import Describing
from capd_client.errors import Counted
from capd_client.key import Key, Moment
from capd_client.memory import arena_nbytes
from capd_client.notices import Notices
from capd_client.placements import with_placements
from capd_client.planning.link import link_of
from capd_client.planning.seen import Calls, IterationSeen, RankSeen, SeriesSeen
from capd_client.planning.watches import PlannedWatches
from capd_client.protocol import Descriptor
from capd_client.slicing import Slice
from capd_client.tensors import PLAIN_TYPES
from capd_client.untraced import untraced

__all__ = ["PlanSink"]

_Series = tuple[Key, str, bool, str]  # key, dtype, payload, device


class _Described(Describing):
    """Describes offers exactly as the stager does, and adds them up."""

    def __init__(
        self,
        books: Accounts,
        notices: Notices,
        steps_of: Callable[[Key], Optional[tuple[str, str]]],
        *,
        payload: bool,
    ) -> None:
        super().__init__(books, notices, payload=payload)
        self._steps_of = steps_of
        self.once: Optional[str] = None  # the tensor on offer if it is kept once per step
        self.seen: dict[_Series, dict[int, Counter[tuple[int, tuple[int, ...], int]]]] = {}
        self.steps: dict[_Series, Optional[tuple[str, str]]] = {}  # asked while the watch is there
        self.seen_once: set[_Series] = set()

    def _put(
        self,
        source: torch.Tensor,
        dtype: torch.dtype,
        definition: Definition,
        descriptor: Descriptor,
        immutable: bool,
    ) -> None:
        moment = descriptor.moment
        if not source.is_cpu and is_capturing(source.device):
            problem = "a CUDA graph is being captured"
            self._refuse(definition, DropReason.STREAM_CAPTURE, moment, problem, descriptor.nbytes)
            return
        series = (definition.key, definition.define.dtype, descriptor.payload, descriptor.device)
        if self.once is not None:
            self.seen_once.add(series)
        if series not in self.seen:
            self.steps[series] = self._steps_of(definition.key)
        calls = self.seen.setdefault(series, {}).setdefault(moment.iteration, Counter())
        calls[moment.micro_batch + moment.call, descriptor.shape, descriptor.nbytes] += 1


class PlanSink:
    """Everything that taps need of a session. Never raises, except under `config.strict`.

    Gates are opened for every step, so that the first `config.plan_steps` iterations show what a selected one captures.
    """

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.notices = Notices()
        self.context = Context(
            iteration=config.iteration,
            sample_idx=config.sample_idx,
            on_iteration=self._begin,
            on_endless=self._cut,
        )
        self.steering = PlannedWatches()
        self.enabled = True
        self._accounts = Accounts(Counters())
        payload = config.mode != "stats"
        self._described = _Described(self._accounts, self.notices, self.steering.steps_of, payload=payload)
        self._devices: set[torch.device] = set()
        self._ring_nbytes: Optional[int] = None
        self._asked: Optional[Moment] = None  # of which was asked last whether it is kept
        self._once: Optional[str] = None  # the name of what then came
        self._began = 0.0
        self.iterations: list[IterationSeen] = []
        self._cut_short = ""

    def _begin(self, iteration: int) -> None:
        """An iteration begins on the thread that trains."""
        if not self.enabled:
            return
        self.stop_clock()
        if len(self.iterations) >= self.config.plan_steps:
            self.enabled = False
        else:
            self.iterations.append(IterationSeen(iteration))
        self.on_boundary()
        self._began = time.monotonic()

    def _cut(self, why: str) -> None:
        """The iteration under way seems to have no end; a session would capture no more of it."""
        if self.enabled:
            self.stop_clock()
            self._cut_short = why
            self.enabled = False
            self.on_boundary()

    def stop_clock(self) -> None:
        """The iteration under way is over."""
        if self.iterations and self.iterations[-1].seconds is None:
            self.iterations[-1].seconds = time.monotonic() - self._began

    def on_boundary(self) -> None:
        """An iteration has just been noted, or, not `enabled` any more, the last one is over."""

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
        """Note one tensor; arguments as for `Session.offer`."""
        if not self.enabled:
            return
        self._described.once = self._once_name(key, moment)
        try:
            if type(tensor) not in PLAIN_TYPES:
                attributes = with_placements(tensor, attributes)
            self._described.stage(tensor, key, moment, cast_to, attributes, metadata, take, immutable, store)
        except Counted as error:
            self._tell("a capture", error.__cause__ or error)
        except Exception as error:
            self.drop_internal("a capture", error)

    def keeps(self, moment: Moment) -> bool:
        """Asked before what is kept once per step. Under sampling every call is to be seen: none is kept for good."""
        self._asked, self._once = moment, None
        return self.config.sample_every == 1

    def _once_name(self, key: Key, moment: Moment) -> Optional[str]:
        """What was asked for comes next: a parameter, and with the same moment and in its name, what belongs to it."""
        name = key.tensor_name.partition(".")[0]
        if self._asked is not moment or name != (self._once or name):
            self._asked = None
            return None
        self._once = name
        return name

    def quant_type(self, dtype: torch.dtype) -> str:
        """The label of a capture that was given none."""
        return self.config.quant_type or short_name(dtype)

    @untraced
    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Note the devices and the ring that each would get; a session would allocate it now."""
        cuda = {device for device in devices if device.type == "cuda"}
        self._devices |= cuda
        for device in cuda:
            self._ring_nbytes = ring_sizes(device, self.config.ring_bytes, self.notices)[0]

    def drop_internal(self, where: str, error: BaseException) -> None:
        """Count a capture that an error inside capd prevents, and log it."""
        self._accounts.refuse(None, DropReason.INTERNAL)
        self._tell(where, error)

    def drop_invalid(self, problem: str, reason: DropReason = DropReason.INVALID_KEY) -> None:
        """Count a capture whose arguments cannot be used, and log why."""
        self._accounts.refuse(None, reason)
        self.notices.warn(reason.value, "a capture was not planned: %s", problem)

    def _tell(self, where: str, error: BaseException) -> None:
        if self.config.strict:
            raise error
        self.notices.warn("internal", "%s failed inside capd: %s: %s", where, type(error).__name__, error)

    def series(self) -> list[SeriesSeen]:
        """What was offered until now, in the order in which it first came."""
        described = self._described
        found = []
        for series, iterations in described.seen.items():
            key, dtype, payload, device = series
            steps, of_statistics = described.steps[series] or (None, "")
            one = SeriesSeen(
                key=key, dtype=dtype, payload=payload, device=device, steps=steps, once=series in described.seen_once,
                iterations={
                    iteration: [Calls(*alike, count) for alike, count in calls.items()]
                    for iteration, calls in iterations.items()
                },
            )  # fmt: skip
            found.append(one)
            if payload and steps and of_statistics and (key, dtype, False, device) not in described.seen:
                found.append(msgspec.structs.replace(one, payload=False, steps=of_statistics, besides=steps))
        return found

    def seen(self, state: str) -> RankSeen:
        """The document of this process. Measures the link, which takes some milliseconds, unless it is running."""
        config, info = self.config, self.context.rank_info
        speed, how = (None, "") if state == "running" else link_of(self._devices, config.max_d2h_gbps)
        return RankSeen(
            rank=info.rank,
            world_size=info.world_size,
            local_world_size=info.local_world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            state=state,
            iterations=self.iterations,
            series=self.series(),
            refused=self._accounts.snapshot().dropped,
            sample_every=config.sample_every,
            policy=config.policy,
            max_step_nbytes=None if config.max_mb_per_step is None else int(config.max_mb_per_step * 1e6),
            arena_nbytes=arena_nbytes(config.arena_bytes, info.local_world_size, self.notices),
            ring_nbytes=self._ring_nbytes,
            link_bytes_per_s=speed,
            link_how=how,
            cut_short=self._cut_short,
        )
