"""The attempts of a run: which attempt the records of a rank belong to.

A rank counts the restarts of its own job. A job that continues a run which has ended counts from 0 again, so the daemon
adds a shift: the attempts that the run already has. All ranks of a job get the same shift, also on several nodes,
because each daemon reads the sessions of all nodes of the run.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from capd.errors import CapdError
from capd.server.rank.rank import RankSession
from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.processes import is_running
from capd.store.catalog.rows import CATALOG_NAME, SessionRow
from capd.store.catalog.sessions import read_sessions
from capd.store.catalog.totals import sums_in
from capd.store.disk.layout import node_directory, nodes_of
from capd_client.protocol.messages import Hello

__all__ = ["Beside", "Member", "read_beside", "shift_of"]

logger = logging.getLogger(__name__)


class Member(NamedTuple):
    """A session of a run, as far as it decides about attempts.

    Attributes:
        attempt: The attempt of its records.
        shift: The part of it that a daemon added.
        world_size: The ranks of its job; 0 if they are not known.
        ended_ns: The end of the session; None if it has not ended.
        runs: Whether its process runs; None if nobody on this node can tell.
    """

    rank: int
    attempt: int
    shift: int
    world_size: int
    started_ns: int
    ended_ns: int | None
    runs: bool | None

    @property
    def own(self) -> int:
        """The restarts that the rank counted itself."""
        return self.attempt - self.shift

    @classmethod
    def of_rank(cls, rank: RankSession) -> Member:
        """Return the member that this daemon serves."""
        hello = rank.hello
        runs = rank.alive and not rank.process.ended
        attempt = hello.attempt + rank.shift
        return cls(hello.rank, attempt, rank.shift, hello.world_size, rank.started_ns, rank.ended_ns, runs)

    @classmethod
    def of_row(cls, row: SessionRow) -> Member:
        """Return the member whose row a daemon saved."""
        ended_ns = None if row.state == "live" else row.ended_ns
        return cls(
            row.rank, row.attempt, row.shift, row.world_size, row.started_ns, ended_ns, is_running(row)
        )


@dataclass
class Beside:
    """The part of a run that other nodes wrote."""

    records: int = 0
    members: list[Member] = field(default_factory=list)


def shift_of(hello: Hello, members: Sequence[Member], *, idle_s: float, stored: int = -1) -> int:
    """Return what to add to the attempt of a rank that the run does not know yet.

    Args:
        hello: The rank.
        members: The sessions of the run on all nodes.
        idle_s: The seconds after its last session during which a job may still bring further ranks.
        stored: The highest attempt of a stored record, for a run whose records came without sessions; -1 without one.
    """
    top = max((one.attempt for one in members), default=stored)
    if hello.attempt > top:
        # The job counts on from the attempts of the run, as a collection does.
        return 0
    # Each later job has the higher attempts. The clocks of the nodes may disagree about the newest session.
    newest = max(members, key=lambda one: (one.attempt, one.started_ns), default=None)
    if newest is not None:
        job = [one for one in members if one.shift == newest.shift]
        restarted = hello.attempt > max(one.own for one in job)
        if restarted or _belongs(hello, job, idle_s):
            return newest.shift
    return max(0, top + 1 - hello.attempt)


def _belongs(hello: Hello, job: Sequence[Member], idle_s: float) -> bool:
    """Return whether a rank belongs to the job of these sessions: the job still runs, or has just lost its ranks."""
    if any(one.runs for one in job):
        return True
    if any((one.rank, one.own) == (hello.rank, hello.attempt) for one in job):
        return False
    since = time.time_ns() - int(idle_s * 1e9)
    recent = any(one.runs is None or (one.ended_ns or 0) >= since for one in job)
    return recent and all(one.world_size in (0, hello.world_size) for one in job)


def read_beside(run: Path, node: str) -> Beside:
    """Return the part of a run that nodes other than `node` wrote. A catalog that cannot be read is logged."""
    found = Beside()
    for name in nodes_of(run):
        catalog = node_directory(run, name) / CATALOG_NAME
        if name == node or not catalog.exists():
            continue
        try:
            with contextlib.closing(connect_read_only(catalog)) as db:
                found.members += map(Member.of_row, read_sessions(db))
                found.records += sums_in(db).records
        except (CapdError, OSError, sqlite3.Error) as error:
            logger.warning("the attempts of node %s are not known: %s", name, error)
    return found
