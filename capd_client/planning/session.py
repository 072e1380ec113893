"""The session of a plan: describes each offer exactly as a capture would, counts it, and forgets it."""

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
from capd_client.process.documents import leave
from capd_client.process.dynamo import untraced
from capd_client.process.log import RateLimitedLog
from capd_client.process.memory import arena_nbytes
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.scalars import is_scalar
from capd_client.staging.border import Border
from capd_client.staging.describe import Described
from capd_client.steps.context import Context

__all__ = ["PlanSession"]

# Key, dtype, payload, device.
_Series = tuple[Key, str, bool, str]


class _Adding:
    """The stager of a plan: counts the described tensors."""

    def __init__(self, accounts: Accounts, steps_of: Callable[[Key], Optional[tuple[str, str]]]) -> None:
        self._accounts = accounts
        self._steps_of = steps_of
        self._seen: dict[_Series, dict[int, Counter[tuple[int, tuple[int, ...], int]]]] = {}
        # Filled at the first offer of a series, while its watch still exists.
        self._steps: dict[_Series, Optional[tuple[str, str]]] = {}
        # Series that are kept once per step.
        self._once: set[_Series] = set()
        # The moment of the last question whether a tensor is kept.
        self._asked: Optional[Moment] = None
        # The name of the tensor that came after this question.
        self._name: Optional[str] = None

    def ask(self, moment: Moment) -> None:
        """Note the question whether a tensor is kept at this moment. It comes before each tensor kept once per step."""
        self._asked, self._name = moment, None

    def put_known(self, *_: object) -> bool:
        """Return False, because a plan has no short way."""
        return False

    def put_number(self, *_: object) -> None:
        """Leave a scalar out: its few bytes do not matter to a plan."""

    def put(self, described: Described) -> None:
        """Count a record of a series. Leave scalars out."""
        definition, descriptor = described.definition, described.descriptor
        if is_scalar(definition.key):
            return
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
        """Count an offer whose `put` an error interrupted."""
        self._accounts.refuse(Refused(reason, described.definition))

    def _is_once(self, key: Key, moment: Moment) -> bool:
        """Return whether the last question of `ask` was about this tensor: a parameter, or a part with its name."""
        name = key.tensor_name.partition(".")[0]
        if self._asked is not moment or name != (self._name or name):
            self._asked = None
            return False
        self._name = name
        return True

    def series(self) -> list[SeriesSeen]:
        """Return the series until now, in the order of their first offers."""
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


class PlanSession(Border):
    """A session whose stager only counts, in place of `capd_client.session.session.Session`.

    It has neither daemon nor arena. The gates are open in every step. So the first `config.plan_steps` iterations show
    the captures of a selected one. Under `capd plan`, `config.plan` is the directory of the documents. The session
    writes its document at its begin, after each iteration, and at its end. Errors are logged, and none reaches the job.
    """

    def __init__(self, config: ClientConfig) -> None:
        self.steering = PlannedWatches()
        self.iterations: list[IterationSeen] = []
        accounts = Accounts(Counters())
        self._adding = _Adding(accounts, self.steering.steps_of)
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
        super().__init__(config, context, RateLimitedLog(), accounts, self._adding, Drop())
        self._write("running")

    def _begin(self, iteration: int) -> None:
        """Note an iteration that begins on the training thread."""
        if not self.enabled:
            return
        self.stop_clock()
        if len(self.iterations) >= self.config.plan_steps:
            self.enabled = False
        else:
            self.iterations.append(IterationSeen(iteration))
        self._write("running" if self.enabled else "complete")
        self._began = time.monotonic()

    def _cut(self, why: str) -> None:
        """End the plan in an iteration that seems to have no end. A session would capture no more of it."""
        if self.enabled:
            self.stop_clock()
            self._cut_short = why
            self.enabled = False
            self._write("complete")

    def flush(self, timeout_s: float) -> bool:
        """Return at once, because nothing is ever in flight."""
        return True

    def keep(self, reason: str) -> None:
        """Do nothing, because a plan captures nothing."""

    def close(self, timeout_s: Optional[float] = None) -> bool:
        """Write the final document. Idempotent."""
        if self.enabled:
            self.enabled = False
            self._write("ended")
        return True

    def forked(self) -> None:
        """Turn the session off in a forked child."""
        self.enabled = False

    def stop_clock(self) -> None:
        """Note the end of the iteration under way."""
        if self.iterations and self.iterations[-1].seconds is None:
            self.iterations[-1].seconds = time.monotonic() - self._began

    def keeps(self, moment: Moment) -> bool:
        """Answer the question before a tensor that is kept once per step. Under sampling, every call must be seen."""
        self._adding.ask(moment)
        return self.config.sample_every == 1

    @untraced
    def prepare(self, devices: Iterable[torch.device]) -> None:
        """Note the devices and the size of their rings. A session would allocate the rings now."""
        cuda = {device for device in devices if device.type == "cuda"}
        self._devices |= cuda
        for device in cuda:
            self._ring_nbytes = ring_sizes(device, self.config.ring_bytes, self.notices)[0]

    def seen(self, state: str) -> RankSeen:
        """Return the document of this process. Unless `state` is "running", this measures the link for some ms."""
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

    def _write(self, state: str) -> None:
        if self.config.plan is None:
            return
        try:
            leave(self.config.plan, self.seen(state))
        except Exception as error:
            self.notices.warn("plan", "the plan cannot be written to %s: %s", self.config.plan, error)
