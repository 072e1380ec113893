"""The metric families of the daemon: names, types, texts and labels, filled from a snapshot.

The labels are `run_id`, `reason`, the name and severity of a rule, and with `metrics_ranks` also `rank`. Never a
tensor, module, layer, iteration, path or error text: their values grow without limit, and the catalog answers
questions about them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from capd.histogram import BOUNDS_S
from capd.server.lab.outcomes import LabCounters
from capd.server.metrics.host import FileSystem, Process
from capd.server.metrics.snapshot import Bucketed, Snapshot
from capd.server.runs.figures import RankFigures, RunFigures
from capd.store.upload.sending.figures import UploadCounters
from capd_client.protocol.counter_page import DROP_REASONS

__all__ = ["Facts", "Family", "Labelled", "families"]

Labels = tuple[tuple[str, str], ...]

# The codes of REJECT, and those of the listener itself.
_CODES = (
    "version", "peer", "arena", "superseded", "run", "malformed", "closing", "resources", "internal",
)  # fmt: skip
_SLURM_RUN = re.compile(r"slurm-(\d+)\.\w+")


class Labelled(NamedTuple):
    """One line of the page. suffix: the part of the name after that of the family, such as "_bucket"."""

    value: float
    labels: Labels = ()
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with all its samples. A counter's name ends in `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    samples: list[Labelled]


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything of the page that is not in a snapshot. Sizes are in bytes.

    Attributes:
        uptime_s: The age of the daemon.
        threads: The encode threads that may run.
        slurm_job_id: The Slurm job of the daemon itself; "" without one.
        each_rank: Whether ranks have families of their own.
        disk: None if the file system does not answer.
        process: None where another exporter gives these figures.
    """

    version: str
    format: str
    node: str
    uptime_s: float
    threads: int
    slurm_job_id: str
    each_rank: bool
    encode_cpu_s: float
    disk: FileSystem | None
    keep_free_nbytes: int
    max_disk_nbytes: int | None
    process: Process | None


def families(facts: Facts, snapshot: Snapshot) -> list[Family]:
    """Return all families of a page."""
    return [
        *_of_daemon(facts, snapshot),
        *_of_runs(facts, snapshot),
        *_of_window(snapshot.runs),
        *_of_disk(facts, snapshot),
        *_of_uploads(snapshot.uploads),
        *_of_rules(snapshot),
        *_of_lab(snapshot.lab),
        *(_of_ranks(snapshot) if facts.each_rank else ()),
        *_of_process(facts.process),
    ]


def _of_daemon(facts: Facts, snapshot: Snapshot) -> Iterable[Family]:
    build = (("version", facts.version), ("format", facts.format), ("node", facts.node))
    codes = dict.fromkeys(_CODES, 0) | snapshot.refused_connections
    yield _gauge("capd_build_info", "The version of capd, its store format and the node, as labels", 1, build)
    yield _gauge("capd_uptime_seconds", "The time since the start of the daemon", facts.uptime_s)
    yield _gauge("capd_threads", "The encode threads that may run", facts.threads)
    yield _gauge("capd_connections", "The open connections of ranks and tools", snapshot.connections)
    yield Family(
        "capd_refused_connections_total", "counter", "The refused connections by code",
        [Labelled(count, (("code", code),)) for code, count in codes.items()],
    )  # fmt: skip
    yield _gauge("capd_runs_omitted", "The runs that this page leaves out", snapshot.omitted)
    yield _gauge(
        "capd_staging_bytes", "The raw bytes between the arenas and the disk", snapshot.staged_nbytes
    )
    yield _gauge(
        "capd_staging_limit_bytes", "The most raw bytes between arenas and disk", snapshot.staging_nbytes
    )
    yield _gauge(
        "capd_oldest_uncommitted_seconds",
        "The age of the oldest capture that arrived and is not committed; 0 without one",
        snapshot.oldest_s,
    )
    yield _histogram(
        "capd_commit_duration_seconds", "From the arrival of a capture to its commit", snapshot.commits
    )
    yield _histogram(
        "capd_sync_duration_seconds", "The syncs before acknowledgements, if durable", snapshot.syncs
    )
    yield _histogram("capd_seal_duration_seconds", "The seals of groups of series", snapshot.seals)
    yield _counter("capd_encode_cpu_seconds_total", "The CPU time of the encode threads", facts.encode_cpu_s)


def _of_runs(facts: Facts, snapshot: Snapshot) -> Iterable[Family]:
    runs = snapshot.runs

    def each(value: Callable[[RunFigures], float]) -> list[Labelled]:
        return [Labelled(value(run), _run(run)) for run in runs]

    yield Family(
        "capd_run_info", "gauge", "The facts of a run, as labels",
        [Labelled(1, (*_run(run), *_run_facts(facts, run))) for run in runs],
    )  # fmt: skip
    yield Family(
        "capd_sessions", "gauge", "The sessions of ranks by state",
        [Labelled(count, (*_run(run), ("state", state))) for run in runs for state, count in run.sessions.items()],
    )  # fmt: skip
    yield Family(
        "capd_records_offered_total", "counter", "The captures that ranks offered",
        each(lambda run: run.offered),
    )  # fmt: skip
    yield Family(
        "capd_records_committed_total", "counter", "The captures that are records in the store",
        each(lambda run: run.committed),
    )  # fmt: skip
    yield Family(
        "capd_records_dropped_total", "counter", "The captures given up; sampled, stopped and expired are choices",
        [
            Labelled(run.dropped[reason.value], (*_run(run), ("reason", reason.value)))
            for run in runs
            for reason in DROP_REASONS
            # Every reason begins at 0, so that `increase` sees the first drop. A run at rest drops nothing more.
            if run.active or run.dropped[reason.value]
        ],
    )  # fmt: skip
    yield Family(
        "capd_records_in_flight", "gauge", "The captures that are neither committed nor dropped",
        each(lambda run: run.in_flight),
    )  # fmt: skip
    yield Family(
        "capd_raw_bytes_total", "counter", "The bytes of the records before encoding",
        each(lambda run: run.raw_nbytes),
    )  # fmt: skip
    yield Family(
        "capd_stored_bytes_total", "counter", "The bytes of the records in the store",
        each(lambda run: run.stored_nbytes),
    )  # fmt: skip
    yield Family(
        "capd_arena_bytes", "gauge", "The size of the arenas of the ranks that are here",
        each(lambda run: run.arena_nbytes),
    )  # fmt: skip
    yield Family(
        "capd_run_quota_ratio", "gauge", "The largest share of a quota that the run uses; absent without a quota",
        [Labelled(run.quota_ratio, _run(run)) for run in runs if run.quota_ratio is not None],
    )  # fmt: skip
    yield Family(
        "capd_values_nonfinite_total", "counter",
        "The non-finite values in records with statistics that this daemon committed",
        [
            Labelled(value, (*_run(run), ("kind", kind)))
            for run in runs
            for kind, value in (("nan", run.nan), ("inf", run.inf))
        ],
    )  # fmt: skip


def _of_window(runs: Iterable[RunFigures]) -> Iterable[Family]:
    held = [(_run(run), run.window) for run in runs if run.window is not None]
    if not held:
        return
    yield Family(
        "capd_window_held_bytes", "gauge", "The bytes that the flight recorder holds, by place",
        [
            Labelled(value, (*labels, ("place", place)))
            for labels, window in held
            for place, value in (("memory", window.memory_bytes), ("disk", window.disk_bytes))
        ],
    )  # fmt: skip
    yield Family(
        "capd_window_held_records", "gauge", "The records that the flight recorder holds; they are in flight",
        [Labelled(window.held_records or 0, labels) for labels, window in held],
    )  # fmt: skip
    yield Family(
        "capd_window_iterations", "gauge", "The iterations that the flight recorder holds",
        [Labelled(window.iterations, labels) for labels, window in held],
    )  # fmt: skip
    yield Family(
        "capd_window_keeps_total", "counter", "The times that the flight recorder kept what it held",
        [Labelled(window.keeps_total, labels) for labels, window in held],
    )  # fmt: skip


def _of_disk(facts: Facts, snapshot: Snapshot) -> Iterable[Family]:
    failed = snapshot.store_failed or facts.disk is None
    yield _gauge("capd_store_failed", "1 if the store cannot write or seal a run", int(failed))
    if facts.disk is not None:
        yield _gauge(
            "capd_store_free_bytes", "The free bytes of the store's file system", facts.disk.free_nbytes
        )
        yield _gauge(
            "capd_store_keep_free_bytes", "The bytes that stay free (keep_free)", facts.keep_free_nbytes
        )
        if facts.disk.inodes is not None:
            yield _gauge(
                "capd_store_free_inodes", "The free inodes of the store's file system", facts.disk.inodes
            )
    yield _gauge("capd_store_used_bytes", "The bytes that count against max_disk", snapshot.used_nbytes)
    if facts.max_disk_nbytes is not None:
        yield _gauge(
            "capd_store_max_disk_bytes",
            "The bytes that this daemon may add (max_disk)",
            facts.max_disk_nbytes,
        )


def _of_uploads(found: UploadCounters | None) -> Iterable[Family]:
    if found is None:
        return
    yield _counter("capd_upload_objects_total", "The objects written to the object store", found.objects)
    yield _counter("capd_upload_bytes_total", "The bytes written to the object store", found.nbytes)
    yield Family(
        "capd_upload_failures_total", "counter", "The uploads that failed and are tried again, by reason",
        [Labelled(count, (("reason", reason),)) for reason, count in found.failures.items()],
    )  # fmt: skip
    yield _gauge(
        "capd_upload_backlog_bytes", "The bytes of sealed shards that are not uploaded", found.backlog_nbytes
    )
    yield _gauge(
        "capd_upload_oldest_seconds",
        "The age of the oldest change that is not uploaded; 0 without one",
        found.oldest_s,
    )


def _of_rules(snapshot: Snapshot) -> Iterable[Family]:
    found = snapshot.alerts
    if found is None:
        return
    shown = {run.run_id for run in snapshot.runs}
    yield Family(
        "capd_alerts_total", "counter", "The alerts by rule and severity",
        [
            Labelled(count, (("run_id", run_id), ("rule", rule), ("severity", severity)))
            for (run_id, rule, severity), count in found.alerts.items()
            if run_id in shown
        ],
    )  # fmt: skip
    yield _counter(
        "capd_alerts_suppressed_total",
        "The times that a rule fired and a cooldown or a limit of a day kept it quiet",
        found.suppressed,
    )
    yield _counter(
        "capd_rule_records_omitted_total", "The records, or their errors, that no rule judged", found.left_out
    )


def _of_lab(found: LabCounters | None) -> Iterable[Family]:
    if found is None:
        return
    yield Family(
        "capd_lab_records_total", "counter", "The records of the lab's sample: measured, or why they are not",
        [Labelled(count, (("outcome", outcome),)) for outcome, count in found.records.items()],
    )  # fmt: skip
    yield _counter("capd_lab_cpu_seconds_total", "The CPU time of measuring errors of formats", found.cpu_s)
    yield _counter("capd_lab_restarts_total", "The losses of the process that measures", found.restarts)


_RANK_FAMILIES: tuple[tuple[str, Literal["counter", "gauge"], str, Callable[[RankFigures], float | None]], ...] = (
    ("capd_rank_records_offered_total", "counter", "The captures that a rank offered",
     lambda rank: rank.offered),
    ("capd_rank_records_committed_total", "counter", "The captures of a rank that are records in the store",
     lambda rank: rank.committed),
    ("capd_rank_records_dropped_total", "counter", "The captures of a rank given up, for all reasons",
     lambda rank: rank.dropped),
    ("capd_rank_records_in_flight", "gauge", "The captures of a rank that are neither committed nor dropped",
     lambda rank: rank.in_flight),
    ("capd_rank_iteration", "gauge", "The current iteration of a rank that is here", lambda rank: rank.iteration),
)  # fmt: skip


def _of_ranks(snapshot: Snapshot) -> Iterable[Family]:
    ranks = [(run, rank, figures) for run in snapshot.runs for rank, figures in sorted(run.ranks.items())]

    def each(value: Callable[[RankFigures], float | None]) -> list[Labelled]:
        found = [((*_run(run), ("rank", str(rank))), value(figures)) for run, rank, figures in ranks]
        return [Labelled(number, labels) for labels, number in found if number is not None]

    for name, kind, text, value in _RANK_FAMILIES:
        yield Family(name, kind, text, each(value))


def _of_process(process: Process | None) -> Iterable[Family]:
    if process is not None:
        yield _counter("process_cpu_seconds_total", "The CPU time of the process", process.cpu_s)
        yield _gauge("process_resident_memory_bytes", "The resident memory", process.resident_nbytes)
        yield _gauge("process_open_fds", "The open file descriptors", process.open_fds)
        yield _gauge("process_start_time_seconds", "The start, in seconds since 1970", process.started_s)


def _run(run: RunFigures) -> Labels:
    return (("run_id", run.run_id),)


def _run_facts(facts: Facts, run: RunFigures) -> Labels:
    found = _SLURM_RUN.fullmatch(run.run_id)
    return (
        ("world_size", str(run.world_size or "")),
        ("quant_type", ",".join(run.quant_types)),
        ("slurm_job_id", found[1] if found else facts.slurm_job_id),
    )


def _gauge(name: str, text: str, value: float, labels: Labels = ()) -> Family:
    return Family(name, "gauge", text, [Labelled(value, labels)])


def _counter(name: str, text: str, value: float) -> Family:
    return Family(name, "counter", text, [Labelled(value)])


def _histogram(name: str, text: str, durations: Bucketed) -> Family:
    counts, total_s = durations
    bounds = [*(repr(bound) for bound in BOUNDS_S), "+Inf"]
    buckets = [
        Labelled(count, (("le", bound),), "_bucket")
        for bound, count in zip(bounds, accumulate(counts), strict=True)
    ]
    return Family(
        name,
        "histogram",
        text,
        [*buckets, Labelled(total_s, (), "_sum"), Labelled(sum(counts), (), "_count")],
    )
