"""The unfinished records of one rank: which bytes of records in parts have come, over all connections. Pure.

The parts of a record come in order, even if a reconnect repeats some of them. A part that has already come is not
taken twice. A gap means that earlier parts went to another daemon.
"""

from __future__ import annotations

from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.messages import Descriptor

__all__ = ["MAX_UNFINISHED", "PartRefused", "Unfinished"]

# Records of one session that may lack parts.
MAX_UNFINISHED = 16


class PartRefused(Exception):
    """The record of a part will never be committed."""

    def __init__(self, reason: DropReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Unfinished:
    """The records in parts of one session that are not committed yet."""

    def __init__(self) -> None:
        # Record → the bytes that have come, from the front, and the bytes of the whole.
        self._records: dict[int, tuple[int, int]] = {}

    def __contains__(self, record: int) -> bool:
        return record in self._records

    def take(self, item: Descriptor) -> bool:
        """Return whether the part is new. Raises PartRefused."""
        part = item.part
        assert part is not None  # noqa: S101 - the caller looked
        come, nbytes = self._records.get(part.record, (0, part.nbytes))
        if part.nbytes != nbytes:
            raise PartRefused(
                DropReason.BAD_DESCRIPTOR,
                f"the record had {nbytes} bytes in an earlier part, not {part.nbytes}",
            )
        # The record is whole, or given up.
        if come == nbytes:
            return False
        if not item.nbytes:
            # The rank gives up the record, even if none of its parts came here. Until the pipeline has settled this,
            # repeated parts must not start the record again.
            self._records[part.record] = (nbytes, nbytes)
            return True
        if part.first + item.nbytes <= come:
            return False
        if part.first != come:
            raise PartRefused(
                DropReason.PARTS_LOST,
                f"{come} of the {part.first} bytes before this part are here; the daemon that had them is gone",
            )
        if not come and len(self._records) >= MAX_UNFINISHED:
            raise PartRefused(
                DropReason.BAD_DESCRIPTOR, f"{MAX_UNFINISHED} records of this rank already lack parts"
            )
        self._records[part.record] = (come + item.nbytes, nbytes)
        return True

    def forget(self, record: int) -> bool:
        """Forget a record that is committed, refused, or given up. Return whether it was known."""
        return self._records.pop(record, None) is not None
