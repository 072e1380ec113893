"""A page is text that Prometheus' own tools accept, in both formats, whatever names a run has."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from typing import Any

import pytest

from capd.metrics import WindowStats
from capd.server.metrics.families import Facts, families
from capd.server.metrics.host import FileSystem, Process
from capd.server.metrics.snapshot import Snapshot
from capd.server.metrics.text import render
from capd.server.rules.alert_counters import AlertCounters
from capd.server.runs.figures import RankFigures, RunFigures
from capd.store.upload.sending.figures import UploadCounters
from capd_client.protocol.counter_page import DROP_REASONS
from tests.kit.metrics.scrape import samples

BUCKETS = [3, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1]


def facts(**changes: Any) -> Facts:
    fields: dict[str, Any] = {
        "version": "1", "format": "1", "node": "n", "uptime_s": 12.5, "threads": 2, "slurm_job_id": "",
        "each_rank": True, "encode_cpu_s": 0.5, "disk": FileSystem(10**9, 1000), "keep_free_nbytes": 10**8,
        "max_disk_nbytes": 10**10, "process": Process(1.5, 10**8, 20, 1.7e9),
    }  # fmt: skip
    return Facts(**{**fields, **changes})


def run(name: str = "run", **changes: Any) -> RunFigures:
    fields: dict[str, Any] = {
        "active": True, "quiet_since": 0.0, "world_size": 8, "quant_types": ("bf16", "mxfp8"),
        "raw_nbytes": 100, "stored_nbytes": 70, "offered": 9, "committed": 4, "in_flight": 2, "quota_ratio": 0.25,
        "dropped": Counter(arena_full=3), "ranks": {0: RankFigures(9, 4, 2, 3, 7)},
        "window": WindowStats(
            iterations=3, first=5, last=7, held_records=2, held_bytes=64, memory_bytes=48, disk_bytes=16, expired=1,
            keeps_total=17, keeps=[],
        ),
    }  # fmt: skip
    return RunFigures(name, **{**fields, **changes})


def snapshot(*runs: RunFigures, **changes: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "taken": 0.0, "connections": 3, "refused_connections": {"peer": 2}, "runs": list(runs), "omitted": 0,
        "staged_nbytes": 5, "staging_nbytes": 10, "oldest_s": 0.25, "commits": (BUCKETS, 33.5),
        "syncs": ([0] * 11, 0.0), "seals": ([0] * 11, 0.0), "encoders": [], "used_nbytes": 7,
        "store_failed": False, "refuses": False,
        "uploads": UploadCounters(5, 4096, {"unreachable": 2, "full": 0}, 1024, 12.5),
        "alerts": AlertCounters({("run", "nan", "critical"): 2, ("gone", "nan", "critical"): 1}, 7, 3),
    }  # fmt: skip
    return Snapshot(**{**fields, **changes})


def page(*runs: RunFigures, openmetrics: bool = False, **changes: Any) -> str:
    return render(families(facts(**changes), snapshot(*runs)), openmetrics=openmetrics).decode()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")
@pytest.mark.parametrize("runs", [(), (run(),), (run(), run("other", world_size=0, quant_types=()))])
def test_promtool_finds_nothing_to_say_about_a_page(runs: tuple[RunFigures, ...]) -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=page(*runs), capture_output=True, text=True, check=False
    )

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_both_formats_say_the_same() -> None:
    text, openmetrics = page(run()), page(run(), openmetrics=True)

    assert samples(text) == samples(openmetrics, openmetrics=True)
    assert openmetrics.endswith("# EOF\n")
    assert "# TYPE capd_records_offered counter\n" in openmetrics
    assert "# TYPE capd_records_offered_total counter\n" in text


def test_a_histogram_is_cumulative_and_its_last_bucket_is_its_count() -> None:
    found = samples(page())
    name = "capd_commit_duration_seconds"

    assert found[f"{name}_bucket", frozenset({("le", "0.001")})] == 3
    assert found[f"{name}_bucket", frozenset({("le", "0.01")})] == 5
    assert found[f"{name}_bucket", frozenset({("le", "+Inf")})] == 6 == found[f"{name}_count", frozenset()]
    assert found[f"{name}_sum", frozenset()] == 33.5


@pytest.mark.parametrize("openmetrics", [False, True])
def test_names_are_escaped_cut_and_never_steer_a_terminal(openmetrics: bool) -> None:
    word = 'a"b\\c\nd\x1b[31m\u202e' + "x" * 200
    raw = page(run(quant_types=(word,)), openmetrics=openmetrics)

    [labels] = [
        dict(labels) for name, labels in samples(raw, openmetrics=openmetrics) if name == "capd_run_info"
    ]
    assert labels["quant_type"] == 'a"b\\c\ufffdd\ufffd[31m\ufffd' + "x" * 115
    assert "\x1b" not in raw


def test_every_reason_of_an_active_run_begins_at_zero_and_a_quiet_one_has_those_that_count() -> None:
    found = samples(page(run("active"), run("quiet", active=False)))
    reasons = {
        name: {dict(labels)["reason"] for metric, labels in found
               if metric == "capd_records_dropped_total" and ("run_id", name) in labels}
        for name in ("active", "quiet")
    }  # fmt: skip

    assert reasons == {"active": {reason.value for reason in DROP_REASONS}, "quiet": {"arena_full"}}


def test_a_window_has_its_figures_and_without_a_recorder_there_are_none() -> None:
    found = {
        (name, frozenset(labels) - {("run_id", "run")}): value
        for (name, labels), value in samples(page(run(), run("other", window=None))).items()
        if "window" in name and ("run_id", "run") in labels
    }

    assert found == {
        ("capd_window_held_bytes", frozenset({("place", "memory")})): 48,
        ("capd_window_held_bytes", frozenset({("place", "disk")})): 16,
        ("capd_window_held_records", frozenset()): 2,
        ("capd_window_iterations", frozenset()): 3,
        ("capd_window_keeps_total", frozenset()): 17,
    }
    assert "window" not in page(run(window=None))


def test_uploads_have_their_figures_and_without_an_address_there_are_none() -> None:
    found = {(name, labels): value for (name, labels), value in samples(page()).items() if "upload" in name}
    silent = render(families(facts(), snapshot(uploads=None)), openmetrics=False).decode()

    assert found == {
        ("capd_upload_objects_total", frozenset()): 5,
        ("capd_upload_bytes_total", frozenset()): 4096,
        ("capd_upload_failures_total", frozenset({("reason", "unreachable")})): 2,
        ("capd_upload_failures_total", frozenset({("reason", "full")})): 0,
        ("capd_upload_backlog_bytes", frozenset()): 1024,
        ("capd_upload_oldest_seconds", frozenset()): 12.5,
    }
    assert "upload" not in silent


def test_a_run_without_a_quota_has_no_ratio() -> None:
    found = samples(page(run("limited"), run("free", quota_ratio=None)))

    assert {labels: value for (name, labels), value in found.items() if name == "capd_run_quota_ratio"} == {
        frozenset({("run_id", "limited")}): 0.25
    }


def test_the_slurm_job_is_that_of_the_run_else_that_of_the_daemon() -> None:
    found = samples(page(run("slurm-123.0"), run("other"), slurm_job_id="9"))
    jobs = {
        dict(labels)["run_id"]: dict(labels)["slurm_job_id"]
        for name, labels in found
        if name == "capd_run_info"
    }

    assert jobs == {"slurm-123.0": "123", "other": "9"}


def test_ranks_and_the_process_are_there_only_where_they_are_wanted() -> None:
    names = {name for name, _ in samples(page(run()))}
    without = {name for name, _ in samples(page(run(), each_rank=False, process=None))}

    assert {name for name in names - without if name.startswith("capd_rank_")} == {
        "capd_rank_records_offered_total", "capd_rank_records_committed_total", "capd_rank_records_dropped_total",
        "capd_rank_records_in_flight", "capd_rank_iteration",
    }  # fmt: skip
    assert {name for name in names - without if not name.startswith("capd_rank_")} == {
        "process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds",
        "process_start_time_seconds",
    }  # fmt: skip
    assert without < names


def test_a_file_system_that_does_not_answer_is_a_failed_store() -> None:
    found = samples(page(disk=None))

    assert found["capd_store_failed", frozenset()] == 1
    assert ("capd_store_free_bytes", frozenset()) not in found
