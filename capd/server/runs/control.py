"""The effect of a tool's CONTROL on a run and its ranks. The answer comes when it is done or the tool's time is over.

An order is a state that the run's ranks will take on (`capd.server.rank.steering`). It remains in force when the tool
disconnects.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from capd.errors import StoreError
from capd.metrics import RankControl
from capd.server.rank.orders import Orders
from capd.server.rank.rank import RankSession
from capd.server.runs.registry import Registry
from capd.server.runs.run import Run
from capd.server.runs.snapshot import rank_control
from capd.window.keeper import Keeper, NoRecorder
from capd_client.errors import ConfigError
from capd_client.process.text import printable
from capd_client.protocol.bounds import MAX_TEXT_CHARS
from capd_client.protocol.control import Control, ControlReply, Steer
from capd_client.protocol.messages import MAX_FRAME_NBYTES, encode
from capd_client.protocol.selection import Ranges

__all__ = ["Controller"]

SEAL_TIMEOUT_S = 600.0
RELEASE_TIMEOUT_S = 5.0
# The shortest time between two looks at the ranks. It grows to 5 % of the waited time, at most _MAX_LOOK_S.
_LOOK_S = 0.02
_MAX_LOOK_S = 1.0
_NAMED_RANKS = 16
_REMAINS = "; the order remains, see `capd ctl status`"


Missing = Callable[[], list[RankSession]]
Wait = Callable[[Missing], list[RankSession]]


@dataclass(frozen=True, slots=True)
class Controller:
    """The executor of CONTROL messages.

    Attributes:
        shutdown: Asks the daemon to stop.
        keeper: The flight recorder.
    """

    registry: Registry
    shutdown: Callable[[], None]
    keeper: Keeper = field(default_factory=NoRecorder)

    def control(self, message: Control, wait: Callable[[float], bool]) -> ControlReply:
        """Carry out the order of a tool and return the reply.

        `wait` waits for some seconds. It returns True if nobody waits for the reply any more.
        """
        reply = self._control(message, wait)
        # Many runs, or a long text of a rank.
        if len(reply.message) > MAX_TEXT_CHARS:
            reply.message = reply.message[: MAX_TEXT_CHARS - 1] + "…"
        return reply

    def _control(self, message: Control, wait: Callable[[float], bool]) -> ControlReply:
        if message.verb == "shutdown":
            self.shutdown()
            return ControlReply("ok", "the daemon is shutting down")
        if message.verb == "seal":
            return self._seal(message.run_id)
        if message.verb == "release":
            return self._release(message.run_id)
        if message.selection is not None:
            try:
                message.selection.check()
            except ConfigError as error:
                return ControlReply("usage", str(error))
        run = self._live_run(message.run_id)
        if isinstance(run, ControlReply):
            return run
        until_done = partial(_wait, message.wait_s, wait)
        if message.verb == "flush":
            return _flush(run, until_done)
        if message.verb == "keep":
            return self._keep(run, message)
        if message.verb != "status":
            return _steer(run, message, until_done)
        return _reply("ok", f"run {run.run_id}", run)

    def _release(self, run_id: str | None) -> ControlReply:
        if run_id is None:
            return ControlReply("usage", "release needs the name of a run")
        problem = self.registry.release(run_id, RELEASE_TIMEOUT_S)
        return ControlReply("failed", problem) if problem else ControlReply("ok", f"released {run_id}")

    def _keep(self, run: Run, message: Control) -> ControlReply:
        reason = printable(message.reason) or "capd ctl keep"
        problem = self.keeper.keep(run.run_id, message.iteration, reason)
        if problem:
            return ControlReply("failed", f"run {run.run_id}: nothing is kept: {problem}")
        around = "its newest iteration" if message.iteration is None else f"iteration {message.iteration}"
        return ControlReply(
            "ok", f"run {run.run_id}: keeps the iterations around {around}; `capd stats` lists them"
        )

    def _live_run(self, run_id: str | None) -> Run | ControlReply:
        live = {run.run_id: run for run in self.registry.runs() if run.alive()}
        names = ", ".join(live) or "none"
        if run_id is not None:
            if run_id not in live:
                problem = f"run {run_id!r} has no live rank at this daemon; runs that have: {names}"
                return ControlReply("nothing", problem)
            return live[run_id]
        if not live:
            return ControlReply("nothing", "no rank is connected to this daemon")
        if len(live) > 1:
            return ControlReply("usage", f"several runs are live: {names}; choose one with --run-id")
        return next(iter(live.values()))

    def _seal(self, run_id: str | None) -> ControlReply:
        opened = {run.run_id: run.opened for run in self.registry.runs()}
        if run_id is not None and run_id not in opened:
            known = ", ".join(opened) or "none"
            return ControlReply("nothing", f"this daemon writes no run {run_id!r}; its runs: {known}")
        run_ids = [known for known in opened if run_id == known or (run_id is None and opened[known])]
        if not run_ids:
            return ControlReply("ok", "no run to seal")
        try:
            futures: list[Future[None]] = [self.registry.seal(run_id) for run_id in run_ids]
            for future in futures:
                future.result(SEAL_TIMEOUT_S)
        except (StoreError, OSError, TimeoutError) as error:
            return ControlReply("failed", f"could not seal: {error or 'timed out'}")
        return ControlReply("ok", f"sealed {', '.join(run_ids)}")


def _wait(wait_s: float, wait: Callable[[float], bool], missing: Missing) -> list[RankSession]:
    """Wait until no rank is missing or the time is over, and return the missing ranks."""
    began = time.monotonic()
    while found := missing():
        waited = time.monotonic() - began
        left, look_s = wait_s - waited, min(max(_LOOK_S, waited / 20), _MAX_LOOK_S)
        if left <= 0 or wait(min(look_s, left)):
            break
    return found


def _steer(run: Run, message: Control, until_done: Wait) -> ControlReply:
    steer = run.steering.order(
        capturing=message.verb != "stop",
        selection=message.selection,
        from_iteration=message.from_iteration,
        begun=[rank.begun for rank in run.alive()],
    )
    for rank in run.alive():
        rank.order(Orders.steer)
    if not message.wait_s:
        return _reply("ok", f"ordered from iteration {steer.from_iteration} on", run)
    late = until_done(lambda: [rank for rank in run.alive() if not _settled(rank, steer)])
    wanted = run.steering.wanted
    if wanted is not None and wanted.id != steer.id:
        return _reply("failed", "a later order has taken the place of this one", run)
    if late:
        return _reply("failed", _unanswered(late, f"iteration {steer.from_iteration}") + _REMAINS, run)
    return _outcome(run, steer)


def _settled(rank: RankSession, steer: Steer) -> bool:
    """Return whether the rank follows `steer`, or has reported why it cannot."""
    steered = rank.orders.steered
    if steered is None or steered.id < steer.id:
        return False
    return bool(steered.problem) or (steered.in_force is not None and steered.in_force.id >= steer.id)


def _outcome(run: Run, steer: Steer) -> ControlReply:
    ranks = run.alive()
    if not ranks:
        return _reply("failed", "every rank left before it took effect", run)
    for rank in ranks:
        steered = rank.orders.steered
        if steered is not None and steered.problem:
            return _reply("failed", f"rank {rank.hello.rank} cannot follow: {steered.problem}", run)
    empty = _why_empty(ranks, steer)
    if empty is not None:
        return _reply("nothing", f"it is in force, but selects nothing: {empty}", run)
    answers = [rank.orders.steered for rank in ranks]
    since = sorted({answer.since for answer in answers if answer is not None and answer.since is not None})
    return _reply("ok", f"in force from iteration {' and '.join(map(str, since))} on", run)


def _why_empty(ranks: list[RankSession], steer: Steer) -> str | None:
    """Return why a selection captures nothing on any rank; None if it captures something or there is none."""
    selection = steer.selection
    if selection is None or not steer.capturing:
        return None
    if selection.steps is not None and not Ranges(selection.steps).reaches(steer.from_iteration):
        return f"steps {selection.steps} end before iteration {steer.from_iteration}"
    chosen = Ranges("all" if selection.ranks is None else selection.ranks)
    if not any(rank.hello.rank in chosen for rank in ranks):
        return f"no rank of this run here is in ranks {selection.ranks}"
    if not any(rank.orders.steered is not None and rank.orders.steered.modules for rank in ranks):
        return (
            "no Linear module of a watched model has such a name"
            if selection.modules
            else "no rank watches a model"
        )
    return None


def _flush(run: Run, until_done: Wait) -> ControlReply:
    drain = run.steering.drain()
    asked = run.alive()
    for rank in asked:
        rank.order(lambda orders: orders.drain(drain))
    late = until_done(lambda: [rank for rank in asked if rank.alive and rank.orders.drained < drain.id])
    if late:
        return _reply("failed", _unanswered(late, "all captures to be committed"), run)
    dead = [str(rank.hello.rank) for rank in asked if rank.died and rank.orders.drained < drain.id]
    if dead:
        return _reply(
            "failed", f"rank {', '.join(dead[:_NAMED_RANKS])} died before it had sent everything", run
        )
    ranks = "1 rank" if len(asked) == 1 else f"{len(asked)} ranks"
    return _reply("ok", f"{ranks}: all captures are committed or counted as dropped", run)


def _unanswered(late: list[RankSession], what: str) -> str:
    named = ", ".join(_where(rank) for rank in late[:_NAMED_RANKS])
    more = f" and {len(late) - _NAMED_RANKS} more" if len(late) > _NAMED_RANKS else ""
    return f"still waiting for {what}: {named}{more}"


def _where(rank: RankSession) -> str:
    at = f"in iteration {rank.begun - 1}" if rank.begun else "before its first iteration"
    return f"rank {rank.hello.rank} ({at if rank.connected else 'not connected'})"


def _reply(code: str, message: str, run: Run) -> ControlReply:
    ranks: list[RankControl] = [rank_control(rank, run.steering.wanted) for rank in run.alive()]
    reply = ControlReply(code, message, [rank.model_dump(mode="json") for rank in ranks])  # type: ignore[arg-type]
    # Hundreds of ranks with long selections.
    if len(encode(reply)) > MAX_FRAME_NBYTES:
        reply.ranks = []
    return reply
