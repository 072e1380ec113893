"""The connection of a tool: STATS, CONTROL and PING, answered one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from capd.errors import ProtocolError
from capd.metrics import DaemonStats
from capd.server.net.peer import Peer
from capd.server.runs.control import Controller
from capd.server.stopping import StopReport
from capd_client.protocol.control import Control, ControlReply, Stats, StatsReply
from capd_client.protocol.messages import MAX_FRAME_NBYTES, ClientMessage, DaemonMessage, Ping, Pong, encode

__all__ = ["ToolContext", "serve_tool"]

# The time between the outcome and the end of the process. The tool hangs up before, if it does not wait for it.
EXIT_S = 5.0


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The objects that all tools' connections share.

    Attributes:
        closing: A descriptor that becomes readable when the daemon shuts down.
        report: How the daemon ended, for tools that ordered its end.
    """

    stats: Callable[[str | None], DaemonStats]
    controller: Controller
    closing: int
    report: StopReport


def serve_tool(
    context: ToolContext, peer: Peer, greeted: Callable[[], None], awaits_end: Callable[[], None]
) -> None:
    """Answer a tool until the daemon shuts down.

    `greeted` is called after each message, `awaits_end` before the daemon stops for this tool, if the tool waits for
    the outcome.

    Raises:
        PeerGone: The tool closed the connection.
        ProtocolError: A message is not one of a tool.
    """
    while peer.fileno() in peer.wait(context.closing):
        message = peer.receive()
        greeted()
        if isinstance(message, Control) and message.verb == "shutdown":
            if peer.uid != os.getuid():
                # The users of --allow-uid share the daemon; none of them ends it for the others.
                peer.send(_not_yours(peer.uid))
                continue
            if not message.wait_s:
                peer.send(_answer(context, peer, message))
                continue
            awaits_end()
            _shut_down(context, peer, message)
            return
        peer.send(_answer(context, peer, message))


def _shut_down(context: ToolContext, peer: Peer, message: Control) -> None:
    """Stop the daemon and tell the tool the outcome. Its connection then ends with the process."""
    with context.report.awaited(message.wait_s) as take:
        context.controller.control(message, lambda _: True)
        peer.send(take())
    peer.wait(timeout_s=EXIT_S)


def _not_yours(uid: int) -> ControlReply:
    owner = os.getuid()
    return ControlReply(
        "failed",
        f"uid {uid} may not end this daemon of uid {owner}; ask uid {owner}, or whoever runs its service",
    )


def _answer(context: ToolContext, peer: Peer, message: ClientMessage) -> DaemonMessage:
    if isinstance(message, Ping):
        return Pong()
    if isinstance(message, Stats):
        return _stats_reply(context.stats(message.run_id))
    if isinstance(message, Control):
        return context.controller.control(
            message, lambda seconds: bool(peer.wait(context.closing, timeout_s=seconds))
        )
    raise ProtocolError(f"a tool does not send {type(message).__name__}")


def _stats_reply(stats: DaemonStats) -> StatsReply:
    reply = StatsReply(stats.model_dump(mode="json"))
    if len(encode(reply)) <= MAX_FRAME_NBYTES:
        return reply
    # With thousands of sessions, only the sums of the runs fit in a frame.
    for run in stats.runs:
        run.sessions = []
    reply = StatsReply(stats.model_dump(mode="json"))
    if len(encode(reply)) > MAX_FRAME_NBYTES:
        reply = StatsReply(stats.model_copy(update={"runs": stats.runs[-100:]}).model_dump(mode="json"))
    return reply
