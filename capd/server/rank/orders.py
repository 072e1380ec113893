"""The orders of tools to one rank, and its answers. Pure; the RankSession calls it under a lock.

There is no queue. Only the newest order of each kind is kept, so a rank that does not read costs nothing.
"""

from __future__ import annotations

from capd.server.rank.steering import RunSteering
from capd_client.errors import ConfigError, ProtocolError
from capd_client.protocol.control import Drain, Drained, Steer, Steered

__all__ = ["Orders"]


class Orders:
    """The orders STEER and DRAIN to one rank, over its reconnects."""

    def __init__(self, steering: RunSteering) -> None:
        # The rank's last report; None: never steered.
        self.steered: Steered | None = None
        # The id of the last DRAIN that it answered.
        self.drained = 0
        self._steering = steering
        # The STEER to send.
        self._steer: Steer | None = None
        # The id of the last STEER on this connection.
        self._sent = 0
        # The DRAIN to send.
        self._drain: Drain | None = None
        # The last DRAIN, which a new connection must repeat.
        self._draining: Drain | None = None

    @property
    def waiting(self) -> bool:
        """Whether an order is to be sent."""
        return self._steer is not None or self._drain is not None

    def connected(self) -> None:
        """Prepare the orders for a new connection, on which none was sent yet."""
        self._steer, self._sent = None, 0
        self.steer()
        self._drain = self._draining

    def steer(self) -> None:
        """Send the rank the wanted state, unless it knows it or got it on this connection."""
        steer = self._steering.for_rank(self.steered)
        if steer is not None and steer.id != self._sent:
            self._steer, self._sent = steer, steer.id

    def drain(self, drain: Drain) -> None:
        """Ask the rank to answer when all of its captures are settled."""
        self._drain = self._draining = drain

    def take(self) -> list[Steer | Drain]:
        """Hand over the orders to send."""
        messages = [message for message in (self._steer, self._drain) if message is not None]
        self._steer = self._drain = None
        return messages

    def answered(self, message: Steered | Drained) -> None:
        """Take an answer of the rank. Raises ProtocolError if its selection is impossible."""
        if isinstance(message, Drained):
            self.drained = message.id
            return
        for steer in (message.in_force, message.pending):
            if steer is not None and steer.selection is not None:
                try:
                    steer.selection.check()
                except ConfigError as error:
                    raise ProtocolError(f"the rank follows an impossible selection: {error}") from None
        self.steered = message
        self._steering.learn(message)
