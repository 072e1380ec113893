"""The session of a plan: describes what is offered exactly as a capture would be, counts it, and forgets it."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Optional

import msgspec
import torch

from capd_client.config.settings import ClientConfig
from capd_client.device.cuda.runtime import is_capturing, ring_sizes
from capd_client.inflight.accounts import Accounts
from capd_client.inflight.capture import Refused
from capd_client.inflight.counters import Counters
from capd_client.inflight.policies import Drop
from capd_client.planning.link import link_of
from capd_client.planning.seen import Calls, IterationSeen, RankSeen, SeriesSeen
from capd_client.planning.watches import PlannedWatches
from capd_client.process.dynamo import untraced
from capd_client.process.log import Notices
from capd_client.process.memory import arena_nbytes
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.staging.border import Border
from capd_client.staging.describe import Described
from capd_client.steps.context import Context

__all__ = ["PlanSink"]

_Series = tuple[Key, str, bool, str]  # key, dtype, payload, device


class _Adding:
    """The stager of a plan: adds up what is described."""

    def __init__(self, accounts: Accounts, steps_of: Callable[[Key], Optional[tuple[str, str]]]) -> None:
        self._accounts = accounts
        self._steps_of = steps_of
        self._seen: dict[_Series, dict[int, Counter[tuple[int, tuple[int, ...], int]]]] = {}
        self._steps: dict[_Series, Optional[tuple[str, str]]] = {}  # asked while the watch is there
        self._once: set[_Series] = set()  # kept once per step
        self._asked: Optional[Moment] = None  # of which was asked last whether it is kept
        self._name: Optional[str] = None  # of the tensor that then came

    def ask(self, moment: Moment) -> None:
        """Whether the next tensor is kept at this moment is asked before one that is kept once per step."""
        self._asked, self._name = moment, None

    def put_known(self, *_: object) -> bool:
        """There is no short way."""
        return False

    def put(self, described: Described) -> None:
        """Count a series' record."""
        definition, descriptor = described.definition, described.descriptor
        moment, device = descriptor.moment, described.source.device
        once = self._is_once(definition.key, moment)
        if device.type != "cpu" and is_capturing(device):
            nbytes = descriptor.nbytes
            self._accounts.refuse(Refused(DropReason.STREAM_CAPTURE, definition, nbytes, moment.iteration))
            return
        series = (definition.key, definition.define.dtype, descriptor.payload, descriptor.device)
        if once:
            self._once.add(series)
        if series not in self._seen:
            self._steps[series] = self._steps_of(definition.key)
        calls = self._seen.setdefault(series, {}).setdefault(moment.iteration, Counter())
        calls[moment.micro_batch + moment.call, descriptor.shape, descriptor.nbytes] += 1

    def settle(self, described: Described, reason: DropReason) -> None:
        """An error came in the middle of `put`."""
        self._accounts.refuse(Refused(reason, described.definition))

    def _is_once(self, key: Key, moment: Moment) -> bool:
        """What was asked for comes next: a parameter, and with the same moment and in its name, what belongs to it."""
        name = key.tensor_name.partition(".")[0]
        if self._asked is not moment or name != (self._name or name):
            self._asked = None
            return False
        self._name = name
        return True

    def series(self) -> list[SeriesSeen]:
        """What was offered until now, in the order in which it first came."""
        found = []
        for series, iterations in self._seen.items():
            key, dtype, payload, device = series
            steps, of_statistics = self._steps[series] or (None, "")
            one = SeriesSeen(
                key=key, dtype=dtype, payload=payload, device=device, steps=steps, once=series in self._once,
                iterations={
                    iteration: [Calls(*alike, count) for alike, count in calls.items()]
                    for iteration, calls in iterations.items()
                },
            )  # fmt: skip
            found.append(one)
            if payload and steps and of_statistics and (key, dtype, False, device) not in self._seen:
                found.append(msgspec.structs.replace(one, payload=False, steps=of_statistics, besides=steps))
        return found


def _nothing() -> None:
    pass


class PlanSink(Border):
    """A session whose stager only describes. It has neither daemon nor arena.

    Gates are opened for every step, so that the first `config.plan_steps` iterations show what a selected one captures.

    on_boundary: called when an iteration has just been noted, or, not `enabled` any more, the last one is over.
    """

    def __init__(self, config: ClientConfig, on_boundary: Callable[[], None] = _nothing) -> None:
        self.steering = PlannedWatches()
        self.iterations: list[IterationSeen] = []
        accounts = Accounts(Counters())
        self._adding = _Adding(accounts, self.steering.steps_of)
        self._on_boundary = on_boundary
        self._devices: set[torch.device] = set()
        self._ring_nbytes: Optional[int] = None
        self._began = 0.0
        self._cut_short = ""
        context = Context(
            iteration=config.iteration,
            sample_idx=config.sample_idx,
            on_iteration=self._begin,
            on_endless=self._cut,
        )
        super().__init__(config, context, Notices(), accounts, self._adding, Drop())

    def _begin(self, iteration: int) -> None:
        """An iteration begins on the thread that trains."""
        if not self.enabled:
            return
        self.stop_clock()
        if len(self.iterations) >= self.config.plan_steps:
            self.enabled = False
        else:
            self.iterations.append(IterationSeen(iteration))
        self._on_boundary()
        self._began = time.monotonic()

    def _cut(self, why: str) -> None:
        """The iteration under way seems to have no end; a session would capture no more of it."""
        if self.enabled:
            self.stop_clock()
            self._cut_short = why
            self.enabled = False
            self._on_boundary()

    def stop_clock(self) -> None:
        """The iteration under way is over."""
        if self.iterations and self.iterations[-1].seconds is None:
            self.iterations[-1].seconds = time.monotonic() - self._began

    def keeps(self, moment: Moment) -> bool:
        """Asked before what is kept once per step. Under sampling every call is to be seen: none is kept for good."""
        self._adding.ask(moment)
        return self.config.sample_every == 1

    @untraced
    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Note the devices and the ring that each would get; a session would allocate it now."""
        cuda = {device for device in devices if device.type == "cuda"}
        self._devices |= cuda
        for device in cuda:
            self._ring_nbytes = ring_sizes(device, self.config.ring_bytes, self.notices)[0]

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
            series=self._adding.series(),
            refused=self.snapshot().dropped,
            sample_every=config.sample_every,
            policy=config.policy,
            max_step_nbytes=config.max_step_nbytes,
            arena_nbytes=arena_nbytes(config.arena_bytes, info.local_world_size, self.notices),
            ring_nbytes=self._ring_nbytes,
            link_bytes_per_s=speed,
            link_how=how,
            cut_short=self._cut_short,
        )
