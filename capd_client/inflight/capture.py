"""One capture in flight, its states, and the word for an offer that does not become one.

COPYING (its thread or device still writes the slot) → READY (may be sent) → gone (settled). ABORTED ones are settled
already and only wait to be taken out of the queue.
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
    """An admitted offer. `descriptor` is sent to the daemon, `budgeted` counts its bytes of the step's budget.

    thread: the one whose call is not over yet; 0 once the capture waits for nothing but its device.
    cell: its place in the journal, as words; None where it has none.
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
    """An offer that is dropped, and why. The log line of the drop is written from this.

    No Struct, whose metaclass makes `isinstance` several times as slow: every capture is asked.

    nbytes, iteration: of the tensor. capacity: bytes of the place that had no room. problem, name: of a tensor that
    cannot be captured as it is. counted: whether the accounts have it.
    """

    reason: DropReason
    definition: Optional[Definition] = None
    nbytes: int = 0
    iteration: int = 0
    capacity: int = 0
    problem: str = ""
    name: str = ""
    counted: bool = False
