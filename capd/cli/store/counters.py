"""The counters of `capd stats` in one shape, from the live daemon or from the store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from capd.cli.stores import is_run, resolve_run
from capd.errors import CapdError, EndpointError, NothingMatched, StoreError
from capd.metrics import (
    NO_RANK,
    SHOWN_KEEPS,
    AlertStats,
    DaemonStats,
    KeepStats,
    LabStats,
    RunCounters,
    RunStats,
    SessionStats,
    UploadStats,
    WindowStats,
)
from capd.server.net.daemon_client import connect
from capd.store.disk.layout import nodes_of
from capd.store.keeps.held_files import left_segments
from capd.store.keeps.keep import Keep
from capd.store.objects.address import Address, RunPlace, place_of
from capd_client.protocol.counter_page import DropReason

if TYPE_CHECKING:
    from capd.store.alerts.alert import Alert
    from capd.store.read.store import Store

__all__ = ["Counters", "Source"]


class Counters(RunCounters):
    """The counters of `capd stats --json`. Bytes are exact. Rates are None if only the store could be asked.

    Attributes:
        source: "daemon" (live) or "store" (the last persisted counters).
        disk_free: The bytes left on the disk; None for a run in an object store.
        why_full: The limit that refused a record as disk_full, "" if none did.
        upload: The uploads of the daemon; None without any, and without a daemon.
        alerts: The rules of the daemon; None without any, and without a daemon.
        run_alerts: The alerts of the run; None from a daemon, and if they cannot be read.
        last_alert: The text of the last of them; None without any.
        lab: The lab of the daemon; None without one, and without a daemon.
        window: What the flight recorder holds, let go and kept; None if it never had anything of the run.
        compression_ratio: raw_bytes / stored_bytes.
    """

    source: str
    compression_ratio: float | None
    rate_mib_s: float | None = None
    why_full: str | None = None
    disk_free: int | None
    keep_free: int | None = None
    max_disk: int | None = None
    upload: UploadStats | None = None
    alerts: AlertStats | None = None
    run_alerts: int | None = None
    last_alert: str | None = None
    lab: LabStats | None = None
    window: WindowStats | None = None


class Source:
    """A source of the counters of one run. Each read asks the daemon if it knows the run, otherwise the store."""

    def __init__(self, store: RunPlace | None, run: str | None) -> None:
        self._store = store
        self._run = run
        # The path of the run that was read last. A read after the daemon has ended stays with it.
        self._last: RunPlace | None = None
        # The reason why the daemon could not be asked.
        self.problem = ""

    def read(self) -> Counters:
        """Return the counters now.

        Raises:
            EndpointError: Neither a daemon nor a store has any.
            NothingMatched: The daemon has no run, and the default store has none.
        """
        live = self._from_daemon()
        if live is not None:
            return live
        try:
            path = self._last or resolve_run(self._store, self._run)
        except CapdError as error:
            if self._store is None and self.problem == NO_RANK:
                raise NothingMatched(NO_RANK) from error
            if self._store is None and self.problem:
                raise EndpointError(f"{self.problem}; and {error}") from error
            raise
        self._last = path
        return read_store(path)

    @property
    def instead(self) -> str:
        """Say why the counters of the default store were read instead of a daemon's. Empty if they were not."""
        return (
            f"{self.problem}; these are the counters of the store" if self.problem and not self._store else ""
        )

    def stay_with(self, counters: Counters) -> None:
        """Read the run of these counters from now on, whichever run is newer."""
        self._run, self._last = counters.run_id, place_of(counters.path)

    def _from_daemon(self) -> Counters | None:
        self.problem = ""
        if isinstance(self._store, Address):
            return None
        try:
            stats = ask_daemon()
        except EndpointError as error:
            self.problem = str(error)
            return None
        run = self._choose(stats)
        if run is None:
            self.problem = "" if stats.runs else NO_RANK
            return None
        self._last = Path(run.path)
        return _live(stats, run)

    def _choose(self, stats: DaemonStats) -> RunStats | None:
        """Return the requested run if this daemon writes it. Without a request, return the newest run."""
        runs = stats.runs
        if self._run is not None:
            runs = [run for run in runs if run.run_id == self._run.removesuffix(".zarr")]
        if isinstance(self._store, Path):
            wanted = self._store.absolute()
            place = str(wanted.resolve())
            here = [run for run in runs if os.path.realpath(run.path) == place]
            if not is_run(wanted):
                here = [run for run in runs if os.path.dirname(os.path.realpath(run.path)) == place]
            runs = here
        alive = [run for run in runs if any(session.state == "live" for session in run.sessions)]
        candidates = alive or runs
        return candidates[-1] if candidates else None


def ask_daemon() -> DaemonStats:
    """Return the daemon's live counters. Raises EndpointError if no daemon answers."""
    from capd.config import load_daemon_settings
    from capd.server.net.endpoint import endpoint_path

    with connect(endpoint_path(load_daemon_settings({}).endpoint)) as tool:
        return tool.stats()


def _live(stats: DaemonStats, run: RunStats) -> Counters:
    return Counters(
        source="daemon",
        compression_ratio=_ratio(run.raw_bytes, run.stored_bytes),
        disk_free=stats.disk_free,
        keep_free=stats.keep_free,
        max_disk=stats.max_disk,
        upload=stats.upload,
        alerts=stats.alerts,
        lab=stats.lab,
        **run.model_dump(exclude={"sealed"}),
    )


def read_store(path: RunPlace) -> Counters:
    """Return the counters that a run's catalogs persisted."""
    from capd.store.read.store import open_store

    store = open_store(path)
    totals = store.totals()
    disk = None if isinstance(path, Address) else os.statvfs(path)
    alerts = _alerts(store)
    return Counters(
        source="store",
        run_id=store.run_id,
        path=str(path if isinstance(path, Address) else path.absolute()),
        compression_ratio=_ratio(totals.raw_bytes, totals.stored_bytes),
        disk_free=None if disk is None else disk.f_bavail * disk.f_frsize,
        sessions=[_session(row) for row in store.sessions],
        run_alerts=None if alerts is None else len(alerts),
        last_alert=alerts[-1].text if alerts else None,
        window=_left_window(path, store.keeps, totals.dropped.get(DropReason.EXPIRED.value, 0)),
        **asdict(totals),
    )


def _alerts(store: Store) -> list[Alert] | None:
    """Return the alerts of a run; None if they cannot be read, which must not hide the counters."""
    try:
        return store.alerts
    except (OSError, StoreError):
        return None


def _left_window(path: RunPlace, keeps: Sequence[Keep], expired: int) -> WindowStats | None:
    """Return what the recorders of a run did, and what one that was killed has left in its spool."""
    held = (
        []
        if isinstance(path, Address)
        else [one for node in nodes_of(path) for one in left_segments(path, node)]
    )
    if not held and not keeps and not expired:
        return None
    iterations = {(one.attempt, one.iteration) for one in held}
    numbers = [number for _, number in iterations]
    in_memory = sum(one.nbytes for one in held if one.in_memory)
    nbytes = sum(one.nbytes for one in held)
    return WindowStats(
        iterations=len(iterations),
        first=min(numbers, default=None),
        last=max(numbers, default=None),
        held_records=None,
        held_bytes=nbytes,
        memory_bytes=in_memory,
        disk_bytes=nbytes - in_memory,
        expired=expired,
        keeps_total=len(keeps),
        keeps=[KeepStats.model_validate(structs.asdict(one)) for one in keeps[-SHOWN_KEEPS:]],
    )


def _session(row: Any) -> SessionStats:
    values = {name: getattr(row, name) for name in SessionStats.model_fields if hasattr(row, name)}
    return SessionStats(**{**values, "client": row.client.hex(), "connected": False})


def _ratio(raw: int, stored: int) -> float | None:
    return raw / stored if stored else None
