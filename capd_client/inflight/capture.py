"""The capture in flight, its states, and the refusal of an offer that does not become a capture.

COPYING (its thread or device still writes the slot) → READY (may be sent) → gone (settled). An ABORTED capture is
settled already and only waits for its removal from the queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import msgspec

from capd_client.arena.allocator import Slot
from capd_client.inflight.definitions import Definition
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.messages import Descriptor

__all__ = ["ABORTED", "COPYING", "READY", "Capture", "Refused"]

COPYING, READY, ABORTED = 0, 1, 2


class Capture(msgspec.Struct, eq=False):
    """An admitted offer.

    Args:
        descriptor: The message that the daemon gets.
        definition: The key, dtype and attributes of the tensor.
        slot: The place of the bytes in the arena.
        state: COPYING, READY or ABORTED.
        sent: Whether the descriptor was sent on some connection.
        budgeted: The bytes that the capture takes of its step's budget.
        thread: The thread whose call is not over yet; 0 if the capture only waits for its device.
        cell: The capture's cell in the journal, as words; None if it has no cell.
        kept: "payload" for the tensor's bytes, "row" for its statistics alone, "parts" for bytes that travel in parts.
    """

    descriptor: Descriptor
    definition: Definition
    slot: Slot
    state: int = COPYING
    sent: bool = False
    budgeted: int = 0
    thread: int = 0
    cell: Any = None
    kept: str = "payload"


@dataclass(eq=False)
class Refused:
    """An offer that is dropped, with the facts for the log line of the drop.

    Not a Struct: every capture passes through `isinstance`, which is several times as slow with a Struct's metaclass.

    Args:
        reason: The reason of the drop.
        definition: The definition of the tensor, if it has one.
        nbytes: The bytes of the tensor.
        iteration: The iteration of the tensor.
        capacity: The bytes of the place that had no room.
        problem: The reason why the tensor cannot be captured as it is, in words.
        name: The name of such a tensor.
        counted: Whether the accounts have counted the drop.
    """

    reason: DropReason
    definition: Optional[Definition] = None
    nbytes: int = 0
    iteration: int = 0
    capacity: int = 0
    problem: str = ""
    name: str = ""
    counted: bool = False
