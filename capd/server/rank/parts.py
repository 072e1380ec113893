"""Which bytes of records in parts have come from one rank, over all its connections. Pure.

Parts of a record come in order, also when a reconnect repeats some of them: what is known to have come is not taken
twice, and a gap means that the parts before it went to another daemon.
"""

from __future__ import annotations

from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.messages import Descriptor

__all__ = ["MAX_UNFINISHED", "PartRefused", "Unfinished"]

MAX_UNFINISHED = 16  # records of one session that lack parts


class PartRefused(Exception):
    """The record that a part belongs to will never be."""

    def __init__(self, reason: DropReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Unfinished:
    """The records of one session that are not committed yet."""

    def __init__(self) -> None:
        self._records: dict[int, tuple[int, int]] = {}  # bytes that have come, from the front, of how many

    def __contains__(self, record: int) -> bool:
        return record in self._records

    def take(self, item: Descriptor) -> bool:
        """Whether the part is new; False for one that has come before. Raises PartRefused."""
        part = item.part
        assert part is not None  # noqa: S101 - the caller looked
        come, nbytes = self._records.get(part.record, (0, part.nbytes))
        if part.nbytes != nbytes:
            raise PartRefused(
                DropReason.BAD_DESCRIPTOR,
                f"the record had {nbytes} bytes in a part before, not {part.nbytes}",
            )
        if come == nbytes:  # whole, or given up
            return False
        if not item.nbytes:  # the rank gives the record up, whether or not anything of it came here
            # until that is done, parts that are repeated are not begun anew
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
                DropReason.BAD_DESCRIPTOR, f"{MAX_UNFINISHED} records of this rank lack parts already"
            )
        self._records[part.record] = (come + item.nbytes, nbytes)
        return True

    def forget(self, record: int) -> bool:
        """The record is committed, refused, or given up. Whether it was known."""
        return self._records.pop(record, None) is not None
