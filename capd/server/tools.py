"""A tool's connection: STATS, CONTROL and PING, answered one after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from capd.errors import ProtocolError, StoreError
from capd.metrics import DaemonStats
from capd.server.peer import Peer
from capd.server.registry import Registry
from capd_client.protocol import (
    MAX_FRAME_NBYTES,
    ClientMessage,
    Control,
    ControlReply,
    DaemonMessage,
    Ping,
    Pong,
    Stats,
    StatsReply,
    encode,
)

__all__ = ["ToolContext", "serve_tool"]

logger = logging.getLogger(__name__)

SEAL_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What the tools' connections work with; `closing` becomes readable when the daemon shuts down."""

    registry: Registry
    stats: Callable[[str | None], DaemonStats]
    stop: Callable[[], None]
    closing: int


def serve_tool(context: ToolContext, peer: Peer, greeted: Callable[[], None]) -> None:
    """Answer a tool until it leaves (PeerGone) or the daemon shuts down; `greeted` is called once it spoke.

    Raises ProtocolError on a message that is not a tool's.
    """
    while peer.fileno() in peer.wait(context.closing):
        message = peer.receive()
        greeted()
        peer.send(_answer(context, message))


def _answer(context: ToolContext, message: ClientMessage) -> DaemonMessage:
    if isinstance(message, Ping):
        return Pong()
    if isinstance(message, Stats):
        return _stats_reply(context.stats(message.run_id))
    if isinstance(message, Control):
        return _control(context, message)
    raise ProtocolError(f"a tool does not send {type(message).__name__}")


def _stats_reply(stats: DaemonStats) -> StatsReply:
    reply = StatsReply(stats.model_dump(mode="json"))
    if len(encode(reply)) <= MAX_FRAME_NBYTES:
        return reply
    for run in stats.runs:  # thousands of sessions: the runs' sums must do
        run.sessions = []
    reply = StatsReply(stats.model_dump(mode="json"))
    if len(encode(reply)) > MAX_FRAME_NBYTES:
        reply = StatsReply(stats.model_copy(update={"runs": stats.runs[-100:]}).model_dump(mode="json"))
    return reply


def _control(context: ToolContext, message: Control) -> ControlReply:
    if message.verb == "stop":
        context.stop()
        return ControlReply(True, "the daemon is shutting down")
    if message.verb != "seal":
        return ControlReply(False, f"unknown action {message.verb!r}; this daemon knows seal and stop")
    run_ids = [message.run_id] if message.run_id else [run.run_id for run in context.registry.runs()]
    if not run_ids:
        return ControlReply(True, "no run to seal")
    try:
        futures = [(run_id, context.registry.seal(run_id)) for run_id in run_ids]
        for _, future in futures:
            future.result(SEAL_TIMEOUT_S)
    except (StoreError, OSError, TimeoutError) as error:
        return ControlReply(False, f"could not seal: {error or 'timed out'}")
    return ControlReply(True, f"sealed {', '.join(run_ids)}")
