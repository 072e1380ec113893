"""The runs of a store root with what a list shows of them, from their catalogs and documents. Nothing is changed.

A run that cannot be read is listed with its problem. No command removes it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from capd.errors import CapdError, NotAStore
from capd.lifecycle.moved import moved_nbytes
from capd.store.catalog.opening import DamagedCatalog, connect_read_only
from capd.store.catalog.processes import is_running
from capd.store.catalog.rows import CATALOG_NAME, SessionRow
from capd.store.catalog.sessions import read_sessions
from capd.store.catalog.totals import iterations_in, log_and_catalog_nbytes, quant_types_in, sums_in
from capd.store.disk.layout import node_directory, nodes_of
from capd.store.disk.run_lock import is_written
from capd.store.documents.remote_state import read_remote_state
from capd.store.documents.tombstone import tombstone_in
from capd.store.documents.zarr_json import run_attributes
from capd.store.keeps.held_files import left_segments, window_nbytes
from capd.store.objects.address import RunPlace

__all__ = ["RunFacts", "RunSummary", "State", "add_sessions", "inventory", "look_at", "run_paths"]

# live: a rank captures, or may come back. open: a daemon has it open, nobody captures. unsealed: a daemon was killed.
State = Literal["live", "open", "unsealed", "sealed", "removing", "unreadable"]

# A rank of another host, whose daemon was killed this long ago, counts as ended.
_GONE_S = 3600.0
_UNREADABLE = (OSError, CapdError, sqlite3.Error, ValueError, TypeError)


@dataclass(slots=True)
class RunSummary:
    """What a list shows of a run, wherever it is.

    Attributes:
        path: Its directory, or its address.
        run_id: The name of its directory without `.zarr`, which is its id unless somebody copied it.
        started_s: When its first rank came, as seconds since 1970; else the time of its document.
        ended_s: The time of its last change.
        state: What happens to it now.
        first_iteration: The first captured iteration; None without records.
        last_iteration: The last captured iteration.
        records: Its committed records.
        raw_bytes: Their bytes before encoding.
        stored_bytes: Their bytes in the store, with frames.
        other_bytes: The bytes of logs and catalogs, and of what a flight recorder holds in the run.
        quant_types: Its quant types, in order.
        ranks: The number of its ranks.
        nodes: The names of the nodes that wrote it.
        command: The command of its first rank; "" if it is unknown.
        tags: Its tags, in order.
        is_pinned: Whether it is pinned.
        problem: Why it is live or unreadable, in words.
        uploaded_to: The address that it is uploaded to; "" if it is not.
        moved_bytes: The stored bytes of the records that are there and not on this disk any more.
    """

    path: RunPlace
    run_id: str
    started_s: float = 0.0
    ended_s: float = 0.0
    state: State = "sealed"
    first_iteration: int | None = None
    last_iteration: int | None = None
    records: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    other_bytes: int = 0
    quant_types: list[str] = field(default_factory=list)
    ranks: int = 0
    nodes: list[str] = field(default_factory=list)
    command: str = ""
    tags: tuple[str, ...] = ()
    is_pinned: bool = False
    problem: str = ""
    uploaded_to: str = ""
    moved_bytes: int = 0

    def add_marks(self, attributes: dict[str, Any]) -> None:
        """Add the tags and the pin in the `capd` attributes of the run."""
        found = attributes.get("tags")
        tags = found if isinstance(found, list) else []
        self.tags = tuple(sorted(tag for tag in tags if isinstance(tag, str)))
        self.is_pinned = attributes.get("pinned") is True

    def add_captured(self, quant_types: Iterable[str], iterations: tuple[int, int] | None) -> None:
        """Add what one node captured."""
        self.quant_types = sorted({*self.quant_types, *quant_types})
        if iterations is not None:
            first, last = self.first_iteration, self.last_iteration
            self.first_iteration = iterations[0] if first is None else min(first, iterations[0])
            self.last_iteration = iterations[1] if last is None else max(last, iterations[1])

    @property
    def nbytes(self) -> int:
        """The bytes that the run takes here, but for its small documents."""
        return self.stored_bytes - self.moved_bytes + self.other_bytes


@dataclass(slots=True)
class RunFacts(RunSummary):
    """One run of a store root on this machine."""

    path: Path


def run_paths(root: Path) -> list[Path]:
    """Return the runs of a store root, the oldest first, as the reading commands order them.

    A directory that ends in `.zarr` and is no run is not among them, nor is a link to another one of them.
    """
    found: list[tuple[int, str, Path]] = []
    place = os.path.realpath(root)
    for document in root.glob("*.zarr/zarr.json"):
        if document.parent.is_symlink() and os.path.dirname(os.path.realpath(document.parent)) == place:
            continue
        with contextlib.suppress(OSError):
            found.append((document.stat().st_mtime_ns, document.parent.name, document.parent))
    return [path for _, _, path in sorted(found)]


def inventory(root: Path) -> list[RunFacts]:
    """Return the runs of a store root, the oldest first."""
    return [look_at(path) for path in run_paths(root)]


def look_at(run: Path, *, is_alone: bool = False) -> RunFacts:
    """Return what is known of one run. is_alone: whether the caller holds its lock alone, so that nobody writes it."""
    facts = RunFacts(run, run.name.removesuffix(".zarr"))
    try:
        # The state goes first: a run that a daemon opens meanwhile is then seen as sealed, and its lock is asked again.
        written = not is_alone and is_written(run)
        facts.started_s = facts.ended_s = (run / "zarr.json").stat().st_mtime
        attributes = run_attributes(run, removed=True)
        facts.add_marks(attributes)
        facts.nodes = nodes_of(run)
        sessions = [(node, row) for node in facts.nodes for row in _add_node(facts, node)]
        add_sessions(facts, [row for _, row in sessions])
        facts.state, facts.problem = _state(facts, sessions, written)
        if tombstone_in(attributes) is not None:
            facts.state = "removing"
    except _UNREADABLE as error:
        facts.state, facts.problem = "unreadable", str(error)
    return facts


def _add_node(facts: RunFacts, node: str) -> list[SessionRow]:
    """Add the totals of one node. Return its sessions."""
    directory = node_directory(facts.path, node)
    facts.other_bytes += log_and_catalog_nbytes(directory / "spool") + window_nbytes(facts.path, node)
    catalog = directory / CATALOG_NAME
    with contextlib.suppress(FileNotFoundError):
        facts.ended_s = max(facts.ended_s, catalog.stat().st_mtime)
    with contextlib.closing(connect_read_only(catalog)) as db:
        try:
            held = sums_in(db)
        except sqlite3.DatabaseError as error:
            raise DamagedCatalog(
                f"{catalog} is damaged: {error}; `capd verify --rebuild-catalog` rebuilds it"
            ) from error
        facts.records += held.records
        facts.raw_bytes += held.raw_bytes
        facts.stored_bytes += held.stored_bytes
        facts.add_captured(quant_types_in(db), iterations_in(db))
        # What cannot be read stops an upload and a removal, but no list.
        with contextlib.suppress(NotAStore):
            if (state := read_remote_state(directory)) is not None:
                facts.uploaded_to = state.to
                facts.moved_bytes += moved_nbytes(facts.path, db)
        return read_sessions(db)


def add_sessions(facts: RunSummary, sessions: Iterable[SessionRow]) -> None:
    """Add what the counters of the ranks tell: how many there were, when the first came, and its command."""
    rows = sorted(sessions, key=lambda row: (row.started_ns, row.rank))
    facts.ranks = len({row.rank for row in rows})
    if rows:
        facts.started_s = rows[0].started_ns / 1e9
        facts.command = next((row.command for row in rows if row.command), "")


def _state(facts: RunFacts, sessions: list[tuple[str, SessionRow]], written: bool) -> tuple[State, str]:
    live = [(node, row) for node, row in sessions if row.state == "live"]
    if live and written:
        return "live", f"rank {live[0][1].rank} is connected"
    why = next(_may_return(facts.path, live), "")
    if why:
        return "live", why
    if written:
        return "open", "a daemon has it open"
    return ("unsealed" if any(_has_spool(facts.path, node) for node in facts.nodes) else "sealed"), ""


def _has_spool(run: Path, node: str) -> bool:
    """Return whether a daemon that was killed left something for the next one: unsealed records, or held ones."""
    spool = node_directory(run, node) / "spool"
    return any(spool.glob("*")) or next(left_segments(run, node), None) is not None


def _may_return(run: Path, live: list[tuple[str, SessionRow]]) -> Iterator[str]:
    """Yield why a rank whose daemon was killed may still run and come back to the next daemon."""
    for node, row in live:
        runs = is_running(row)
        if runs:
            yield f"rank {row.rank} (pid {row.pid}) runs, and its daemon does not"
        if runs is not None:
            continue
        directory = node_directory(run, node)
        times = [path.stat().st_mtime for path in (directory, directory / CATALOG_NAME) if path.exists()]
        if time.time() - max(times, default=0.0) < _GONE_S:
            yield f"rank {row.rank} may still run on {row.host}: its daemon ended less than an hour ago"
