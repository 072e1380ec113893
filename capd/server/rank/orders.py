"""What one rank is to be told on behalf of tools, and what it answered. Pure; its RankSession holds a lock around it.

Never a queue: of each kind only the newest is kept, so a rank that does not read costs nothing.
"""

from __future__ import annotations

from capd.server.rank.steering import RunSteering
from capd_client.errors import ConfigError, ProtocolError
from capd_client.protocol.control import Drain, Drained, Steer, Steered

__all__ = ["Orders"]


class Orders:
    """STEER and DRAIN to one rank, over its reconnects."""

    def __init__(self, steering: RunSteering) -> None:
        self.steered: Steered | None = None  # as the rank told it last; None: never steered
        self.drained = 0  # id of the last DRAIN that it answered
        self._steering = steering
        self._steer: Steer | None = None  # to be sent
        self._sent = 0  # id of the last STEER for this connection
        self._drain: Drain | None = None  # to be sent
        self._draining: Drain | None = None  # the last one, asked anew on a new connection

    @property
    def waiting(self) -> bool:
        """Something is to be sent."""
        return self._steer is not None or self._drain is not None

    def connected(self) -> None:
        """A new connection knows nothing."""
        self._steer, self._sent = None, 0
        self.steer()
        self._drain = self._draining

    def steer(self) -> None:
        """Tell the rank what is wanted of it, unless it knows or was told on this connection."""
        steer = self._steering.for_rank(self.steered)
        if steer is not None and steer.id != self._sent:
            self._steer, self._sent = steer, steer.id

    def drain(self, drain: Drain) -> None:
        """Ask the rank to answer once everything that it captured is settled."""
        self._drain = self._draining = drain

    def take(self) -> list[Steer | Drain]:
        """Hand over what is to be sent."""
        messages = [message for message in (self._steer, self._drain) if message is not None]
        self._steer = self._drain = None
        return messages

    def answered(self, message: Steered | Drained) -> None:
        """The rank answers. Raises ProtocolError on a selection that cannot be."""
        if isinstance(message, Drained):
            self.drained = message.id
            return
        for steer in (message.in_force, message.pending):
            if steer is not None and steer.selection is not None:
                try:
                    steer.selection.check()
                except ConfigError as error:
                    raise ProtocolError(f"the rank follows a selection that cannot be: {error}") from None
        self.steered = message
        self._steering.told(message)
