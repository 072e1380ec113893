"""The daemon's live state: the schema of the STATS reply, `capd stats --json` and `capd ctl status --json`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = [
    "NO_RANK",
    "SHOWN_KEEPS",
    "AlertStats",
    "DaemonStats",
    "KeepStats",
    "LabStats",
    "QuotaUse",
    "RankControl",
    "RunCounters",
    "RunStats",
    "SessionStats",
    "Steer",
    "UploadStats",
    "WindowStats",
]


NO_RANK = (
    "no rank has connected; scripts that do not import capd_client need CAPD_WATCH=1, "
    "or `capd run --attach -- CMD`"
)
"""The reason why a daemon has no run, for its log and for `capd stats`."""


SHOWN_KEEPS = 16
"""The keeps of a run that counters list."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SessionStats(_Model):
    """The counters of one rank: offered = committed + in_flight + Σ dropped.

    Attributes:
        client: The uuid in hex.
        end: The end of a rank that died ("SIGKILL", "exit code 3"); "" if the kernel does not report it.
        connected: The rank has a connection now.
        dropped: The drops by reason.
        iteration: The current iteration; null before the first one, and for a rank that was released or persisted.
        arena_bytes: The size of its arena; 0 once it is released.
        arena_used: The bytes of its captures that arrived and are not committed. They hold slots of the arena.
        clean: False if the daemon that saved the counters did not see the rank's end. The counters may then be up to
            one second old.
    """

    client: str
    rank: int
    attempt: int
    host: str
    pid: int
    state: Literal["live", "ended", "died"]
    end: str
    connected: bool
    offered: int
    committed: int
    in_flight: int
    dropped: dict[str, int]
    clean: bool
    iteration: int | None = None
    arena_bytes: int = 0
    arena_used: int = 0

    @property
    def killed(self) -> bool:
        """Whether a signal ended the process. `end` names it."""
        return bool(self.end) and not self.end.startswith("exit code")


class QuotaUse(_Model):
    """The use of one quota of a run, in bytes. of: the rank or the series that uses it most, "" for the run."""

    limit: Literal["run_max", "rank_max", "series_max"]
    of: str
    used: int
    max: int


class RunCounters(_Model):
    """The counters of one run.

    Attributes:
        statistics_records: The number of records with only statistics (mode or policy stats).
        scalar_records: The number of records that are scalars.
        error_records: The number of records whose errors in formats were measured while capturing.
        clean: False if a kill cut off the last persisted second of some session's counters.
        quotas: The use of the quotas that the daemon enforces. Empty without a daemon.
    """

    run_id: str
    path: str
    offered: int
    committed: int
    in_flight: int
    dropped: dict[str, int]
    records: int
    statistics_records: int
    scalar_records: int
    error_records: int
    raw_bytes: int
    stored_bytes: int
    sessions: list[SessionStats]
    clean: bool
    quotas: list[QuotaUse] = []


class KeepStats(_Model):
    """A keep of the flight recorder: the iterations `first` to `last`, for `reason`, asked on `node`."""

    time_ns: int
    reason: str
    attempt: int
    iteration: int
    first: int
    last: int
    node: str


class WindowStats(_Model):
    """What the flight recorder holds of one run. Without a daemon: what one that was killed has left.

    Attributes:
        iterations: The number of iterations that are held.
        first: The smallest of them; null without any.
        last: The largest of them.
        held_records: The records. They count as in flight. Null without a daemon.
        held_bytes: The bytes that they take in memory and on disk.
        memory_bytes: The part in memory.
        disk_bytes: The part on disk.
        expired: The records that this daemon let go; without a daemon, all that were let go.
        keeps_total: The number of keeps.
        keeps: The last 16 of them.
    """

    iterations: int
    first: int | None
    last: int | None
    held_records: int | None
    held_bytes: int
    memory_bytes: int
    disk_bytes: int
    expired: int
    keeps_total: int
    keeps: list[KeepStats]


class RunStats(RunCounters):
    """The counters of one run on this node. Bytes and records count since this daemon opened the run.

    Attributes:
        rate_mib_s: The raw MiB committed per second, over the last few seconds.
        sealed: Nothing was committed since the last seal.
        why_full: The reason of the disk_full refusals, and how full the disk is; "" without refusals.
        window: What the flight recorder holds; null without one.
    """

    rate_mib_s: float
    sealed: bool
    why_full: str
    window: WindowStats | None = None


class UploadStats(_Model):
    """The uploads of one daemon to an object store.

    Attributes:
        to: The address above the runs'.
        state: ok; retrying (the last try failed); failed (somebody has to do something, such as setting credentials).
        problem: The last failure; "" without one.
        note: What the object store does not enforce; "" if it enforces everything.
        objects: The objects that were written since the start.
        bytes: Their bytes.
        failures: The rounds that failed, by reason.
        backlog_bytes: The bytes of sealed shards that are not in the object store yet.
        oldest_s: The age of the oldest of them, in seconds; 0 without one.
        moved_shards: The local shards that `delete_local` replaced by stubs since the start.
        moved_bytes: Their bytes.
        kept_shards: The times that one had to stay, because its object was wrong.
    """

    to: str
    state: Literal["ok", "retrying", "failed"]
    problem: str
    note: str
    objects: int
    bytes: int
    failures: dict[str, int]
    backlog_bytes: int
    oldest_s: float
    moved_shards: int = 0
    moved_bytes: int = 0
    kept_shards: int = 0


class AlertStats(_Model):
    """The rules of one daemon, `[[trigger]]` in capd.toml. Numbers count since its start.

    Attributes:
        rules: The number of rules.
        alerts: The alerts.
        suppressed: The firings that a cooldown or a limit of a day kept quiet.
        records: The committed records that the rules were offered.
        records_left_out: Those that were not judged, because too many waited.
        errors: The records whose errors of formats the rules were offered; 0 if no rule asks for any.
        errors_left_out: Those that were not judged, because too many waited.
        series_forgotten: The times that a rule had to forget a series for another one.
        not_stored: The alerts that are in no file, because it could not be written.
        commands_failed: The commands that could not be started, failed, or took too long.
        commands_left_out: The commands that were not run, because too many waited.
        last: The text of the last alert; null without one.
        last_ns: Its time, as nanoseconds since 1970.
        last_severity: Its severity.
        last_run: Its run.
    """

    rules: int
    alerts: int
    suppressed: int
    records: int
    records_left_out: int
    errors: int
    errors_left_out: int
    series_forgotten: int
    not_stored: int
    commands_failed: int
    commands_left_out: int
    last: str | None
    last_ns: int | None
    last_severity: Literal["info", "warning", "critical"] | None
    last_run: str | None


class LabStats(_Model):
    """The lab of one daemon: errors of formats on a sample of the records.

    Attributes:
        formats: The formats.
        sample: The share of calls, as "1/8".
        cpu: The share of one CPU that it may take.
        problem: Why it measures nothing now; "" if it does.
        records: The records of the sample by outcome: measured, or why not.
        waiting: The records that wait to be measured.
        waiting_bytes: Their bytes.
        cpu_s: The CPU time that measuring took.
        restarts: The times that the process that measures was lost.
    """

    formats: list[str]
    sample: str
    cpu: float
    problem: str
    records: dict[str, int]
    waiting: int
    waiting_bytes: int
    cpu_s: float
    restarts: int


class DaemonStats(_Model):
    """The state of one daemon. Disk sizes are in bytes.

    Attributes:
        upload: Its uploads; null without any.
        oldest_s: The age of the oldest capture that arrived and is not committed; 0 without one.
        alerts: Its rules and their alerts; null without rules.
        lab: Its lab; null without any.
        arriving: The number of connections whose rank has no run yet. No run counts the captures in their arenas.
        refused_connections: The refused connections by code.
    """

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
    oldest_s: float = 0.0
    arriving: int = 0
    refused_connections: dict[str, int]
    runs: list[RunStats]
    upload: UploadStats | None = None
    alerts: AlertStats | None = None
    lab: LabStats | None = None


class Selected(_Model):
    """The selection that replaces the job's own. null: as in the job."""

    steps: str | None
    micro_batches: str | None
    ranks: str | None
    modules: list[str] | None
    tensors: list[str] | None


class Steer(_Model):
    """An order to capture or to stop, from `from_iteration` on. selection: null for the job's own selection."""

    from_iteration: int
    capturing: bool
    selection: Selected | None


class RankControl(_Model):
    """The steering of one rank.

    Attributes:
        run_id: The run of the rank.
        iteration: The current iteration, null before the first one.
        in_force: The order in force, null if there was none and the job's script decides.
        since: The rank's iteration when that order came into force.
        modules: The number of Linear modules that it captures.
        pending: The order that is not in force yet.
        received: The rank has received that order.
        problem: The reason why the newest order could not be followed.
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
