"""What `capd plan` makes of the documents that the processes of a job leave."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from capd.cli.jobs import process_group
from capd.cli.jobs.startup import Startup
from capd.cli.run.plan import _check_seen, _plan
from capd.cli.run.planned_job import PlannedJob, documents
from capd.config import DaemonSettings
from capd.errors import CapdError, NothingMatched
from capd_client.planning.seen import Calls, IterationSeen, RankSeen, SeriesSeen
from capd_client.planning.text import plan_lines
from capd_client.planning.whole import whole_plan
from capd_client.protocol.key import Key
from tests.kit.processes import is_running, until

SERIES = SeriesSeen(
    key=Key(quant_type="fp32", rank=0, tensor_name="x"), dtype="float32", payload=True, device="cpu", steps=None,
    once=False, iterations={0: [Calls(0, (2,), 8, 1)]},
)  # fmt: skip


def seen(pid: int, **changes: Any) -> RankSeen:
    values: dict[str, Any] = {
        "rank": 0, "world_size": 2, "local_world_size": 2, "host": "a", "pid": pid, "state": "complete",
        "iterations": [IterationSeen(0, 1.0)], "series": [SERIES], "refused": {}, "sample_every": 1,
        "policy": "block", "max_step_nbytes": None, "arena_nbytes": 1 << 20, "ring_nbytes": None,
        "link_bytes_per_s": None, "link_how": "",
    }  # fmt: skip
    return RankSeen(**{**values, **changes})


def test_of_a_restarted_ranks_processes_the_one_that_got_farthest_counts(tmp_path: Path) -> None:
    left = [
        seen(1, state="running"),
        seen(2),
        seen(3, state="ended", series=[]),
        seen(4, rank=1, state="running"),
    ]
    for one in left:
        (tmp_path / f"a.{one.pid}.json").write_bytes(msgspec.json.encode(one))
    (tmp_path / "a.5.json.tmp").write_text("half")

    assert sorted(one.pid for one in documents(tmp_path)) == [2, 4]


@pytest.mark.parametrize(
    ("found", "code", "error", "words"),
    [
        ([], 0, NothingMatched, "calls neither capd_client.watch nor capture"),
        ([seen(1, series=[])], 0, NothingMatched, "in 1 steps"),
        ([seen(1, series=[], iterations=[])], 0, NothingMatched, "the watched models hold nothing that is"),
        ([], 3, CapdError, "exit code 3"),
        ([], None, CapdError, "--timeout"),
    ],
)
def test_a_job_that_offers_nothing_is_told_why(
    found: list[RankSeen], code: int | None, error: type[CapdError], words: str
) -> None:
    with pytest.raises(error, match=words) as raised:
        _check_seen(found, code, 5.0, Startup("off").why_nothing)
    assert type(raised.value) is error


def test_a_rank_that_captures_nothing_is_a_line_of_its_own() -> None:
    plan = whole_plan([seen(1), seen(2, rank=1, series=[])], host="b", disk=None, ended=True)

    lines = list(plan_lines(plan))

    at = lines.index("one captured step of rank 1:")
    assert lines[at + 1] == "nothing"
    assert plan["nodes"][0]["bytes"] == 8


def test_a_job_that_does_not_hear_sigterm_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "END_S", 0.5)
    pids = tmp_path / "pids"
    # What a worker in a session of its own is known by: its document, and the directory in its environment.
    script = f"trap '' TERM; setsid sleep 600 & echo $! > {pids}; sleep 600 & echo $! >> {pids}; wait; wait"

    with PlannedJob(["sh", "-c", script], {**os.environ, "CAPD_PLAN": str(tmp_path)}, tmp_path) as job:
        job.start()
        until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        worker, child = map(int, pids.read_text().split())
        (tmp_path / "a.json").write_bytes(msgspec.json.encode(seen(worker, state="running")))
        assert job.wait(0.2, all_nodes=False) is None

    until(lambda: not any(is_running(pid) for pid in (worker, child)))


def test_what_a_job_leaves_behind_that_ended_by_itself_is_left_alone(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/pid"

    with PlannedJob(["sh", "-c", script], dict(os.environ), tmp_path) as job:
        job.start()
        assert job.wait(30, all_nodes=False) == 0
    pid = int((tmp_path / "pid").read_text())
    try:
        assert is_running(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_every_json_field_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "json.md").read_text()
    text = text[text.index("## capd plan") : text.index("## capd ctl")]
    disk = {"store": "/s", "free_bytes": 9, "max_disk": 9, "keep_free": 0, "write_bytes_per_s": None}
    plan = whole_plan([seen(1)], host="a", disk=disk, ended=True)
    [rank], [node] = plan["ranks"], plan["nodes"]

    fields = {*plan, *rank, *node, *disk, *rank["iterations"][0], *rank["series"][0]} - set(
        Key.__struct_fields__
    )

    assert {field for field in fields if f"`{field}`" not in text} == set()


@pytest.mark.parametrize(("nbytes", "fits"), [(1 << 20, True), (5 << 20, True), ((5 << 20) - 1, False)])
def test_a_plan_says_whether_the_flight_recorder_holds_its_iterations(nbytes: int, fits: bool) -> None:
    host = socket.gethostname()
    large = msgspec.structs.replace(SERIES, iterations={0: [Calls(0, (1 << 17,), 1 << 19, 1)]})
    reduced = msgspec.structs.replace(large, payload=False)
    two = [
        seen(1, host=host, series=[large, reduced]), seen(2, rank=1, host=host, series=[large]),
        seen(3, rank=2, host="other", series=[large]),
    ]  # fmt: skip
    iterations = 5 if nbytes > 1 << 20 else 1
    settings = DaemonSettings(window_iterations=iterations, window_bytes=nbytes)
    plan = _plan(two, settings, ended=True)

    here, other = plan["nodes"]
    assert other["window"] is None
    assert here["window"] == {
        "iterations": iterations, "step_bytes": 1 << 20, "bytes": iterations << 20, "limit_bytes": nbytes, "fits": fits,
    }  # fmt: skip
    [line] = [line for line in plan_lines(plan) if line.startswith("  window ")]
    assert f"{iterations} x 1.0 MiB = {iterations}.0 MiB" in line
    assert line.endswith("[window] bytes hold" if fits else "[window] bytes do not hold")
    warned = [text for text in plan["warnings"] if "only the newest 4 are held" in text]
    assert bool(warned) is not fits
    assert _plan(two, DaemonSettings(), ended=True)["nodes"][0]["window"] is None


def test_a_plan_says_what_containers_need_for_the_arenas_and_the_daemon() -> None:
    """The kernel charges an arena to its rank, and the staging buffers to the daemon."""
    plan = _plan([seen(1, host="a"), seen(2, rank=1, host="b")], DaemonSettings(), ended=True)
    assert [(node["arena_bytes"], node["daemon_bytes"]) for node in plan["nodes"]] == [(1 << 20, None)] * 2

    here = socket.gethostname()
    plan = _plan(
        [seen(1, host=here), seen(2, rank=1, host=here)], DaemonSettings(staging_bytes=1 << 20), ended=True
    )
    [line] = [line for line in plan_lines(plan) if line.startswith("  containers ")]
    assert (
        line
        == "  containers add 2.0 MiB (2 x 1.0 MiB) to the memory limit of the ranks, and 257.0 MiB to the daemon's"
    )
