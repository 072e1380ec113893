"""How far the job of a collection run is, in one line."""

from __future__ import annotations

from dataclasses import dataclass

from capd.cli.collection_daemon import Seen
from capd.cli.output import human_nbytes
from capd.collect.request import Request
from capd.drops import lost

__all__ = ["Progress", "progress_text"]


@dataclass(frozen=True)
class Progress:
    """A type and its job. micro_batches: kept of the rank that has the fewest. expected: records, where countable."""

    quant_type: str
    micro_batches: int
    records: int
    expected: int | None
    seconds: float


def progress_text(progress: Progress, request: Request, found: Seen | None) -> str:
    """The line. found: what the daemon says, None where it does not answer."""
    wanted = f" of {request.micro_batches:,}" if request.micro_batches else ""
    expected = "" if progress.expected is None else f" of {progress.expected:,}"
    parts = [
        progress.quant_type,
        f"{progress.micro_batches:,}{wanted} micro-batches",
        f"{progress.records:,}{expected} records",
    ]
    if found is None:
        parts.append("the daemon does not answer")
    else:
        run = found.run
        parts.append(f"{0.0 if run is None else run.rate_mib_s:.1f} MiB/s")
        parts.append(f"disk left {human_nbytes(max(0, found.daemon.disk_free - found.daemon.keep_free))}")
        parts.append(f"{0 if run is None else sum(lost(run.dropped).values()):,} dropped")
    limit = f" of {request.timeout_s:.0f} s" if request.timeout_s else ""
    return " · ".join([*parts, f"{progress.seconds:.0f} s{limit}"])
