"""The daemon's live state: schema of the STATS reply, of `capd stats --json` and of `capd ctl status --json`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["DaemonStats", "RankControl", "RunStats", "SessionStats", "Steer"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SessionStats(_Model):
    """Counters of one rank; at rest offered = committed + in_flight + Σ dropped.

    `clean` is false when the counters were persisted by a daemon that did not see the rank's end: they may
    then be up to one second old. `connected`: a connection of the rank stands right now.
    """

    client: str  # uuid, hex
    rank: int
    attempt: int
    host: str
    pid: int
    state: Literal["live", "ended", "died"]
    end: str  # of one that died: "SIGKILL", "exit code 3"; "" where the kernel does not tell
    connected: bool
    offered: int
    committed: int
    in_flight: int
    dropped: dict[str, int]  # reason → count
    clean: bool

    @property
    def killed(self) -> bool:
        """Whether a signal ended its process, which `end` names."""
        return bool(self.end) and not self.end.startswith("exit code")


class RunStats(_Model):
    """Counters of one run on this node. Bytes and records count from when this daemon opened the run."""

    run_id: str
    path: str
    offered: int
    committed: int
    in_flight: int
    dropped: dict[str, int]
    records: int
    statistics_records: int  # of them, those that keep statistics alone (mode or policy stats)
    raw_bytes: int
    stored_bytes: int
    rate_mib_s: float  # raw MiB committed per second, over the last few seconds
    sealed: bool  # nothing was committed since the last seal
    why_full: str  # what refused a record as disk_full, and how full it is; "" where nothing did
    sessions: list[SessionStats]
    clean: bool


class DaemonStats(_Model):
    """One daemon. `arriving`: connections whose rank has no place yet, so that no run counts what is in its arena.
    `refused_connections` counts refusals by code; disk sizes in bytes."""

    version: str
    pid: int
    node: str
    store: str
    endpoint: str
    uptime_s: float
    threads: int
    disk_free: int
    keep_free: int
    max_disk: int | None
    connections: int
    arriving: int = 0
    refused_connections: dict[str, int]
    runs: list[RunStats]


class Selected(_Model):
    """What stands in for the job's own selection; null: as the job says."""

    steps: str | None
    micro_batches: str | None
    ranks: str | None
    modules: list[str] | None
    tensors: list[str] | None


class Steer(_Model):
    """A capture that was ordered: from `from_iteration` on. `selection` null: what the job itself selects."""

    from_iteration: int
    capturing: bool
    selection: Selected | None


class RankControl(_Model):
    """How one rank is steered.

    iteration: the one it is in, null before the first. in_force: null while only the job's script was ever in force;
    `since`: its iteration when that began. modules: Linear modules captured under it. pending: not in force yet;
    `received`: the rank knows of it. problem: why the newest order could not be followed. run_id: its run.
    """

    run_id: str
    rank: int
    attempt: int
    host: str
    pid: int
    connected: bool
    iteration: int | None
    capturing: bool
    in_force: Steer | None
    since: int | None
    modules: int | None
    pending: Steer | None
    received: bool
    problem: str
    in_flight: int
    dropped: dict[str, int]
