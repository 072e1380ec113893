"""The state of a daemon at one moment: its node, runs and ranks, with rates and forecasts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from capd.drops import left_out, lost
from capd.metrics import AlertStats, LabStats, QuotaUse, SessionStats, UploadStats

__all__ = [
    "MAX_RANKS", "MAX_RUNS", "Earlier", "LiveSample", "NodeState", "RankState", "RunState", "main_reason",
    "newest_sessions", "rank_state_word", "ranks_of",
]  # fmt: skip

MAX_RUNS = 64
"""The most runs of a sample. Of more, those with live ranks come first, then the newest."""
MAX_RANKS = 1024
"""The most ranks of one run in a sample."""


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank. Its counters are those of its newest attempt.

    Attributes:
        client: The uuid of the rank's process in hex. It identifies the rank in the samples.
        state: live, lost (its connection is gone and may come back), ended or died.
        end: How a rank that died ended, as far as the kernel says.
        iteration: The last iteration that is known, null before the first one.
        behind: The iterations that the front rank of the run is ahead; None if unknown.
        rate: The records committed per second; None without two samples.
        dropped: The captures that were lost, by reason.
        left_out: The captures that the settings leave out, by reason.
        arena_bytes: The size of its arena; 0 once it is released.
        arena_used: The bytes of captures that arrived and are not committed.
    """

    client: str
    rank: int
    attempt: int
    host: str
    pid: int
    state: str
    end: str
    iteration: int | None
    behind: int | None
    offered: int
    committed: int
    in_flight: int
    rate: float | None
    dropped: Mapping[str, int]
    left_out: Mapping[str, int]
    arena_bytes: int
    arena_used: int


@dataclass(frozen=True, slots=True)
class RunState:
    """One run on this node.

    Attributes:
        ranks: The ranks in order, each by its newest attempt.
        omitted_ranks: The ranks beyond MAX_RANKS, and those whose counters do not fit into the daemon's answer.
        earlier: The sessions of earlier attempts, which `ranks` leaves out. Their counters are in those of the run.
        rate: The records committed per second; None without two samples.
        nbytes_s: The raw bytes committed per second.
        dropped: The captures that were lost, by reason.
        left_out: The captures that the settings leave out, by reason.
        why_full: Why records were refused as disk_full; "" if none was.
    """

    run_id: str
    path: str
    ranks: tuple[RankState, ...]
    omitted_ranks: int
    earlier: int
    offered: int
    committed: int
    in_flight: int
    records: int
    raw_bytes: int
    stored_bytes: int
    rate: float | None
    nbytes_s: float | None
    dropped: Mapping[str, int]
    left_out: Mapping[str, int]
    sealed: bool
    why_full: str
    quotas: tuple[QuotaUse, ...] = ()

    @property
    def live(self) -> int:
        """The number of ranks that are there, with a connection or between two of them."""
        return sum(rank.state in ("live", "lost") for rank in self.ranks)

    @property
    def iteration(self) -> int | None:
        """The iteration of the front rank among those that are there, else among all; None before the first one."""
        there = [rank for rank in self.ranks if rank.state in ("live", "lost")] or self.ranks
        return max((rank.iteration for rank in there if rank.iteration is not None), default=None)

    @property
    def arena(self) -> tuple[int, int]:
        """The bytes used in the ranks' arenas, and their size."""
        return sum(rank.arena_used for rank in self.ranks), sum(rank.arena_bytes for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class NodeState:
    """One daemon and its disk.

    Attributes:
        room: The bytes that captures may still take: by the free space above keep_free, and by max_disk.
        fill_s: The bytes per second by which the room went down over the last minute; None without two samples.
        full_in_s: The seconds until the room is used up at this rate; None if it is not going down.
        oldest_s: The age of the oldest capture that arrived and is not committed; 0 without one.
        runs: The runs, the newest last; at most MAX_RUNS.
        omitted_runs: The number of other runs.
        rules: Its rules and their alerts; None without rules.
        lab: Its lab; None without one.
    """

    node: str
    version: str
    pid: int
    store: str
    uptime_s: float
    connections: int
    arriving: int
    disk_free: int
    keep_free: int
    max_disk: int | None
    room: int
    fill_s: float | None
    full_in_s: float | None
    oldest_s: float
    runs: tuple[RunState, ...]
    omitted_runs: int
    upload: UploadStats | None = None
    rules: AlertStats | None = None
    lab: LabStats | None = None


@dataclass(frozen=True, slots=True)
class LiveSample:
    """What a sampler knows at one moment.

    Attributes:
        time_ns: When the last answer came; 0 before the first.
        node: The state by the last answer; None before the first.
        problem: Why the daemon did not answer this time; "" if it did.
        silent_s: The seconds since the last answer; 0 if it answered.
    """

    time_ns: int = 0
    node: NodeState | None = None
    problem: str = ""
    silent_s: float = 0.0

    @property
    def gone(self) -> bool:
        """Whether the daemon did not answer. `node` is then as it was."""
        return bool(self.problem)


@dataclass(slots=True)
class Earlier:
    """What earlier samples add to one session: its last iteration, and its rate."""

    iterations: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float | None] = field(default_factory=dict)


def main_reason(dropped: Mapping[str, int]) -> str:
    """Return the reason with the most drops; "" without drops."""
    return max(dropped, key=lambda reason: (dropped[reason], reason), default="")


def rank_state_word(rank: RankState) -> str:
    """Return the state of a rank for people, with how it ended."""
    return f"{rank.state} ({rank.end})" if rank.end else rank.state


def newest_sessions(sessions: list[SessionStats]) -> list[SessionStats]:
    """Return the sessions of each rank's newest attempt, in order of the ranks."""
    last: dict[int, int] = {}
    for session in sessions:
        last[session.rank] = max(session.attempt, last.get(session.rank, 0))
    newest = [session for session in sessions if session.attempt == last[session.rank]]
    return sorted(newest, key=lambda session: (session.rank, session.client))


def ranks_of(sessions: list[SessionStats], known: Earlier) -> tuple[RankState, ...]:
    """Return the ranks of a run from the sessions of their newest attempts."""
    at = {
        session.client: session.iteration
        if session.iteration is not None
        else known.iterations.get(session.client)
        for session in sessions
    }
    # A rank that left before the others is not behind them.
    front = max(
        (step for s in sessions if s.state == "live" and (step := at[s.client]) is not None), default=None
    )
    return tuple(
        _rank(session, at[session.client], front, known.rates.get(session.client)) for session in sessions
    )


def _rank(session: SessionStats, iteration: int | None, front: int | None, rate: float | None) -> RankState:
    is_live = session.state == "live"
    behind = None if not is_live or front is None or iteration is None else front - iteration
    return RankState(
        client=session.client,
        rank=session.rank,
        attempt=session.attempt,
        host=session.host,
        pid=session.pid,
        state="lost" if is_live and not session.connected else session.state,
        end=session.end,
        iteration=iteration,
        behind=behind,
        offered=session.offered,
        committed=session.committed,
        in_flight=session.in_flight,
        rate=rate,
        dropped=lost(session.dropped),
        left_out=left_out(session.dropped),
        arena_bytes=session.arena_bytes,
        arena_used=session.arena_used,
    )
