"""One capture in flight, and its states.

COPYING (its thread or device still writes the slot) → READY (may be sent) → gone (settled). ABORTED ones are settled
already and only wait to be taken out of the queue.
"""

from __future__ import annotations

from typing import Any

import msgspec

from capd_client.allocator import Slot
from capd_client.definitions import Definition
from capd_client.protocol import Descriptor

__all__ = ["ABORTED", "COPYING", "READY", "Capture"]

COPYING, READY, ABORTED = 0, 1, 2


class Capture(msgspec.Struct, eq=False):
    """One capture in flight. `descriptor` is what the daemon is told, `budgeted` its bytes of the step's budget.

    thread: the one whose call is not over yet; 0 once the capture waits for nothing but its device.
    cell: where it stands in the journal, as words; None where it does not.
    """

    descriptor: Descriptor
    definition: Definition
    slot: Slot
    state: int = COPYING
    sent: bool = False
    budgeted: int = 0
    thread: int = 0
    cell: Any = None
