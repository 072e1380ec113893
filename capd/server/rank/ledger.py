"""The drop ledger of one session: cumulative drops per key and reason. Pure, in memory."""

from __future__ import annotations

import math

import msgspec

from capd.server.rank.accounting import MAX_COUNT
from capd.store.catalog.rows import LedgerRow
from capd_client.protocol.counter_page import DROP_REASONS, DropReason
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.key import Key
from capd_client.protocol.messages import Define, Descriptor, DropRow

__all__ = ["MAX_LEDGER_NBYTES", "Ledger"]

# The limit for one session, over all its connections: some 40,000 rows.
MAX_LEDGER_NBYTES = 16 << 20
# The size of a row without its key.
_ROW_NBYTES = 256
# Together with MAX_COUNT, the sums of a row can always be encoded.
_MAX_NBYTES = 1 << 62


class Ledger:
    """The cumulative drop rows of one session. The larger count wins, because the rank may repeat rows or lag.

    The daemon's own refusals are entered here, too. They are then known per key even if the rank dies before it can
    report them. Rows beyond MAX_LEDGER_NBYTES are left out: their drops still count in the session's counters, without
    a key. Not thread-safe.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[Key, str, str], LedgerRow] = {}
        self._room_nbytes = MAX_LEDGER_NBYTES

    def report(self, define: Define, row: DropRow) -> None:
        """Enter a row of the rank."""
        reason = DROP_REASONS[row.reason].value
        entry = LedgerRow(
            define.key, define.dtype, reason, min(row.count, MAX_COUNT), min(row.nbytes, _MAX_NBYTES),
            row.first_iteration, row.last_iteration,
        )  # fmt: skip
        self._enter(entry)

    def refuse(self, item: Descriptor, define: Define, reason: DropReason) -> None:
        """Count one refusal of the daemon, with the bytes of its tensor, as the rank does."""
        nbytes = math.prod(item.shape) * ITEM_NBYTES.get(define.dtype, 0)
        self.let_go(define, reason, item.moment.iteration, 1, nbytes)

    def let_go(self, define: Define, reason: DropReason, iteration: int, count: int, nbytes: int) -> None:
        """Count captures of one key and iteration that are not committed."""
        known = self._rows.get((define.key, define.dtype, reason.value))
        first, last = iteration, iteration
        nbytes = min(nbytes, _MAX_NBYTES)
        if known is not None:
            count += known.count
            nbytes = min(known.nbytes + nbytes, _MAX_NBYTES)
            first, last = min(first, known.first_iteration), max(last, known.last_iteration)
        self._enter(LedgerRow(define.key, define.dtype, reason.value, count, nbytes, first, last))

    def rows(self) -> list[LedgerRow]:
        """Return all rows."""
        return list(self._rows.values())

    def _enter(self, entry: LedgerRow) -> None:
        key = (entry.key, entry.dtype, entry.reason)
        known = self._rows.get(key)
        if known is None:
            nbytes = _ROW_NBYTES + len(msgspec.msgpack.encode(key))
            if nbytes > self._room_nbytes:
                return
            self._room_nbytes -= nbytes
        elif entry.count <= known.count:
            return
        self._rows[key] = entry
