"""The daemon's live counters: schema of the STATS reply and of `capd stats --json`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["DaemonStats", "RunStats", "SessionStats"]


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
    connected: bool
    offered: int
    committed: int
    in_flight: int
    dropped: dict[str, int]  # reason → count
    clean: bool


class RunStats(_Model):
    """Counters of one run on this node. Bytes and records count from when this daemon opened the run."""

    run_id: str
    path: str
    offered: int
    committed: int
    in_flight: int
    dropped: dict[str, int]
    records: int
    raw_bytes: int
    stored_bytes: int
    rate_mib_s: float  # raw MiB committed per second, over the last few seconds
    sealed: bool  # nothing was committed since the last seal
    sessions: list[SessionStats]
    clean: bool


class DaemonStats(_Model):
    """One daemon. `refused_connections` counts refusals by code; disk sizes in bytes."""

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
    refused_connections: dict[str, int]
    runs: list[RunStats]
