"""The marks of a removal: in the attributes of a run's zarr.json, and as a note that stays when the run is gone.

`removed` in a run's attributes says that the whole run is being removed. `removing` names series that are being
removed, `removed_series` those that are gone. The note `<root>/.capd/removed/<run>.json` remains after the run left
its place.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from capd.errors import NotAStore, RemovedRun
from capd.store.documents.json_document import is_length, read_document

__all__ = [
    "RemovedSeries",
    "Tombstone",
    "check_present",
    "note_path",
    "removed_note",
    "removed_series",
    "tombstone_in",
]

_MAX_USER_CHARS = 256
# The name of an entry of the trash leads nowhere else.
_ENTRY = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9]{1,6}")
_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Who removed something, and when.

    Attributes:
        at: The time (UTC) in the form 2026-11-26T19:03:00Z.
        by: The user.
    """

    at: str
    by: str

    @classmethod
    def now(cls, by: str) -> Tombstone:
        """Return the mark of a removal at this moment."""
        return cls(datetime.datetime.now(datetime.UTC).strftime(_FORMAT), by)

    def __str__(self) -> str:
        return f"removed on {self.at[:10]} {self.at[11:16]} UTC by {self.by}"


@dataclass(frozen=True, slots=True)
class RemovedSeries:
    """Some series that one command removed.

    Attributes:
        mark: When, and by whom.
        entry: The name of the entry in the trash.
        records: Their records.
        stored_bytes: The bytes of their encoded payloads and frames.
        paths: Their paths.
    """

    mark: Tombstone
    entry: str
    records: int
    stored_bytes: int
    paths: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """Return the member of the document."""
        counts = {"entry": self.entry, "records": self.records, "stored_bytes": self.stored_bytes}
        return {**asdict(self.mark), **counts, "paths": list(self.paths)}


def tombstone_in(attributes: Mapping[str, Any]) -> Tombstone | None:
    """Return the mark in a run's `capd` attributes, or in a note; None if there is none."""
    return _mark(attributes.get("removed"))


def _mark(found: Any) -> Tombstone | None:
    if not isinstance(found, dict):
        return None
    at, by = found.get("at"), found.get("by")
    if not isinstance(at, str) or not isinstance(by, str) or len(by) > _MAX_USER_CHARS:
        return None
    try:
        canonical = datetime.datetime.strptime(at, _FORMAT).strftime(_FORMAT)
    except ValueError:
        return None
    # The name of an entry of the trash is made of it.
    return Tombstone(at, by) if at == canonical else None


def removed_series(attributes: Mapping[str, Any], member: str = "removed_series") -> list[RemovedSeries]:
    """Return the removed series that a run's attributes name. A member that is not valid is left out.

    Args:
        attributes: The `capd` attributes of the run.
        member: "removed_series", or "removing".
    """
    given = attributes.get(member)
    return list(_series(given)) if isinstance(given, list) else []


def _series(given: list[Any]) -> Iterator[RemovedSeries]:
    for one in given:
        mark = _mark(one)
        if mark is None:
            continue
        entry, paths = one.get("entry"), one.get("paths")
        counts = one.get("records"), one.get("stored_bytes")
        if not isinstance(entry, str) or not _ENTRY.fullmatch(entry):
            continue
        if not isinstance(paths, list) or not all(map(is_length, counts)):
            continue
        if all(isinstance(path, str) and is_series_path(path) for path in paths):
            yield RemovedSeries(mark, entry, *counts, tuple(paths))


def is_series_path(path: str) -> bool:
    """Return whether a text can be the path of a series: five names, none of which leads elsewhere."""
    parts = path.split("/")
    return len(parts) == 5 and all(part and not part.startswith(".") and "\0" not in part for part in parts)


def note_path(run: Path) -> Path:
    """Return the place of the note about a removed run."""
    return run.parent / ".capd" / "removed" / f"{run.name}.json"


def removed_note(run: Path) -> Tombstone | None:
    """Return the mark of a run that is gone from its place; None if no note tells of it."""
    try:
        return tombstone_in(read_document(note_path(run)) or {})
    except (NotAStore, OSError):
        return None


def note_payload(mark: Tombstone) -> bytes:
    """Return the content of a note."""
    return json.dumps({"removed": asdict(mark)}).encode() + b"\n"


def check_present(run: Path, attributes: Mapping[str, Any] | None = None) -> None:
    """Check that a run was not removed.

    Args:
        run: The directory of the run.
        attributes: Its `capd` attributes. None: the run is not at its place.

    Raises:
        RemovedRun: It was. The message says when, by whom, and how to get it back.
    """
    mark = removed_note(run) if attributes is None else tombstone_in(attributes)
    if mark is not None:
        raise RemovedRun(
            f"{run} was {mark}; `capd rm --restore {run}` brings it back while it is in the trash (`capd gc` lists it)"
        )
