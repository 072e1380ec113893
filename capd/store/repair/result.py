"""The result of a repair: the saved records, counted, and the lost ones, listed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from capd.store.format.frames import RecordRow
from capd_client.protocol.key import Key

__all__ = ["LostRecord", "Repair"]


@dataclass(frozen=True, slots=True)
class LostRecord:
    """A record that the new run lacks.

    Attributes:
        number: Its number in the damaged run.
        row: None if no file describes it.
        is_errors: Whether it is the errors of formats on a record.
    """

    path: str
    key: Key
    number: int
    row: RecordRow | None
    is_errors: bool = False


@dataclass(slots=True)
class Repair:
    """The result of a repair.

    Attributes:
        saved: The records in the new run, without errors of formats.
        saved_errors: The errors of formats on records in the new run.
        lost: All records that it lacks, and errors of formats among them.
        unknown: What no file describes: paths of series, open shards, and logs with records whose series is lost.
    """

    run: Path
    new: Path
    saved: int = 0
    saved_errors: int = 0
    lost: list[LostRecord] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether the new run has all records of the damaged one."""
        return not self.lost and not self.unknown
