"""The connection of one rank, read by its own thread: HELLO, then messages until the connection ends.

The connection ends with BYE, end of file, a violation of the protocol, a takeover by a newer connection, or the
daemon's shutdown. It also ends with the rank's process, because a forked child may hold the socket open. Messages that
the rank sent before its death are still read. An error affects only its own connection.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from capd._version import __version__
from capd.errors import ProtocolError, StoreError
from capd.server.net.peer import Peer, PeerGone, Refusal
from capd.server.net.sender import Sender, SendLoop
from capd.server.priority import yield_to_training
from capd.server.process import command_of
from capd.server.rank.rank import RankSession
from capd.server.runs.registry import Registry
from capd.window.keeper import Keeper
from capd_client.process.text import printable
from capd_client.protocol.control import Drained, Keep, KeepReply, Steered
from capd_client.protocol.messages import (
    PING_INTERVAL_S,
    PROTOCOL_VERSION,
    Bye,
    ByeOk,
    ClientMessage,
    Define,
    Drops,
    Flush,
    Hello,
    Ping,
    Pong,
    Put,
    Reject,
    Welcome,
)

__all__ = ["ConnectionContext", "serve_rank"]

logger = logging.getLogger(__name__)

# At shutdown, messages that a living rank has already sent are read for this time. The rank keeps the rest.
DRAIN_S = 2.0
BYE_SAVE_S = 20.0


@dataclass(frozen=True, slots=True)
class ConnectionContext:
    """The objects that all connections of one daemon share.

    Attributes:
        closing: A descriptor that becomes readable when the daemon shuts down.
        drained_by: Returns the time (monotonic) until which connections may wait for outcomes at shutdown.
        save: Persists a rank's counters.
        hurry: Ends the pause before records that somebody waits for.
        keeper: The flight recorder.
    """

    registry: Registry
    root: Path
    epoch: bytes
    closing: int
    drained_by: Callable[[], float]
    save: Callable[[RankSession], Future[None]]
    hurry: Callable[[], None]
    sending: SendLoop
    keeper: Keeper


def serve_rank(
    context: ConnectionContext,
    peer: Peer,
    fd: int,
    greeted: Callable[[], None],
    admitted: Callable[[], None] = lambda: None,
) -> None:
    """Serve a rank until its connection ends, and close `fd`, the descriptor of its arena.

    `greeted` is called when HELLO is here, `admitted` when the rank is admitted to its run.

    Raises:
        Refusal: The rank must be sent away. No sender runs yet, so the caller answers.
        ProtocolError: The same, because the rank broke the protocol.
        PeerGone: The rank closed the connection before it was welcomed.
    """
    process = peer.process_handle()
    try:
        hello = peer.receive()
        greeted()
        if not isinstance(hello, Hello):
            raise ProtocolError(f"a rank begins with HELLO, not {type(hello).__name__}")
        rank = context.registry.admit(hello, fd, process)
        # The session owns the handle now.
        watched, process = process, None
        rank.command = rank.command or command_of(peer.pid)
        admitted()
    finally:
        os.close(fd)
        if process is not None:
            os.close(process)
    connection = _RankConnection(context, peer, rank, hello)
    logger.info("rank %d connected to run %s (pid %d)", hello.rank, rank.run_id, peer.pid)
    yield_to_training()
    connection.run(watched)


class _RankConnection:
    def __init__(self, context: ConnectionContext, peer: Peer, rank: RankSession, hello: Hello) -> None:
        self._context = context
        self._peer = peer
        self._rank = rank
        self._ordinal = hello.connection
        self._name = f"rank {hello.rank}"
        try:
            # Before the sender exists, because WELCOME must be the first message.
            peer.send(self._welcome())
            # Not a method of self, which would be a reference cycle.
            take = partial(rank.take_replies, hello.connection)
            self._sender = Sender(peer, context.sending, take)
        except PeerGone:
            rank.disconnect(self._ordinal)
            raise

    def _welcome(self) -> Welcome:
        run_id = self._rank.run_id
        return Welcome(
            protocol=PROTOCOL_VERSION,
            epoch=self._context.epoch,
            run_id=run_id,
            store=str(self._context.root / f"{run_id}.zarr"),
            version=__version__,
            attempt=self._rank.hello.attempt + self._rank.shift,
            held_before=self._rank.continued,
        )

    def run(self, process: int | None) -> None:
        """Read until the connection ends, then let the sender finish."""
        last: Reject | None = None
        self._rank.attach(self._ordinal, self._sender)
        try:
            last = self._read(process)
        except PeerGone:
            pass
        except Refusal as refusal:
            last = refusal.reject
        except ProtocolError as error:
            logger.warning("%s (pid %d) broke the protocol: %s", self._name, self._peer.pid, error)
            last = Reject("malformed", str(error))
        finally:
            # This comes first, because `disconnect` drops the replies that wait.
            self._sender.close(last)
            self._rank.disconnect(self._ordinal)
            logger.info("%s disconnected", self._name)

    def _read(self, process: int | None) -> Reject | None:
        """Handle messages until the connection ends. Return the last message for the rank, if there is one.

        A dead rank's messages are read to the end, however long that takes, because nobody else has them.
        """
        closing = self._context.closing
        others = [closing] if process is None else [closing, process]
        until: float | None = None
        while True:
            ready = self._peer.wait(*others)
            if until is None and closing in ready:
                until = time.monotonic() + DRAIN_S
            last = self._context.drained_by() if process in ready else until
            over = closing in ready and last is not None and time.monotonic() > last
            if self._peer.fileno() not in ready or over:
                break
            if not self._handle(self._peer.receive()):
                return None
        if closing in ready:
            self._rank.wait_idle(self._context.drained_by() - time.monotonic())
            return Reject("closing", "the daemon is shutting down", retry=True)
        return None

    def _handle(self, message: ClientMessage) -> bool:
        """Act on one message. Return False after BYE. Raises Refusal if a newer connection took over."""
        rank, ordinal = self._rank, self._ordinal
        current = True
        if isinstance(message, Put):
            current = rank.put(ordinal, message)
            if rank.is_pressed(message.items):
                self._context.hurry()
            self._hold_back()
        elif isinstance(message, Define):
            nbytes = self._peer.received_nbytes
            current = rank.apply(ordinal, lambda session: session.define(message, nbytes))
        elif isinstance(message, Drops):
            current = rank.apply(ordinal, lambda session: session.drops(message))
        elif isinstance(message, Flush):
            current = rank.apply(ordinal, lambda session: session.flush(message))
            self._context.hurry()
        elif isinstance(message, (Steered, Drained)):
            current = rank.apply(ordinal, lambda _: rank.orders.answered(message))
        elif isinstance(message, Keep):
            problem = self._context.keeper.keep(
                rank.run_id,
                message.iteration,
                printable(message.reason),
                attempt=rank.hello.attempt + rank.shift,
                asker=f"rank {rank.hello.rank}",
            )
            self._sender.post(KeepReply(message.id, problem))
        elif isinstance(message, Ping):
            self._sender.post(Pong())
        elif isinstance(message, Bye):
            current = rank.end(ordinal)
            if current:
                self._say_goodbye()
                return False
        else:
            raise ProtocolError(f"a rank does not send {type(message).__name__}")
        if not current:
            raise Refusal("superseded", "a newer connection of this client took over")
        return True

    def _hold_back(self) -> None:
        """Stop reading while too much of this rank is in work. PONGs show the rank that the daemon lives."""
        while not self._rank.wait_for_room(PING_INTERVAL_S / 2):
            if self._peer.wait(self._context.closing, timeout_s=0) >= {self._context.closing}:
                return
            self._sender.post(Pong())

    def _say_goodbye(self) -> None:
        """Answer BYE when the final counters are on disk. If they cannot be saved, the connection just ends."""
        until = time.monotonic() + BYE_SAVE_S
        self._rank.wait_idle(BYE_SAVE_S)
        try:
            self._context.save(self._rank).result(max(0.0, until - time.monotonic()))
            self._sender.post(ByeOk())
        except (TimeoutError, OSError, StoreError) as error:
            logger.error("final counters of %s could not be saved: %s", self._name, error)
