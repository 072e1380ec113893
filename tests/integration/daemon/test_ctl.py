"""`capd ctl` on two training ranks: every record that should be there is, no other, and training stays the same."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import capd as capd_package
from capd.cli.app import main
from capd_client.protocol.control import Control, ControlReply
from capd_client.protocol.messages import Reject, encode
from capd_client.protocol.selection import Selection
from tests.integration.daemon.train_job import MICRO_BATCHES, TENSORS, WATCHED
from tests.kit import daemon as daemon_kit
from tests.kit import forking
from tests.kit.processes import Daemon, Rank, StartRank, live_stats, until
from tests.kit.store.cli import Result

TRAIN_JOB = (sys.executable, str(Path(__file__).with_name("train_job.py")))
TRAINS: dict[str, Any] = {"command": TRAIN_JOB, "imports": forking.TRAINING}
COMPILED_JOB = str(Path(__file__).with_name("compiled_job.py"))
WAYS = ("eager", "whole", "blocks")  # of being compiled; rank n is WAYS[n]
# For ranks that are asked whether they are connected: on a busy machine three pings may take longer than a second.
PATIENT = {"CAPD_PING_S": "5", "CAPD_EXIT_TIMEOUT_S": "90"}
Record = tuple[int, str, str, int, int]  # rank, module, tensor_name, iteration, micro_batch


Ctl = Callable[..., Result]


@pytest.fixture
def ctl(daemon: Daemon) -> Ctl:
    """`ctl("stop")` runs `capd ctl stop` within this process; it must end with `code`."""

    def run(*arguments: str, code: int = 0) -> Result:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
            main(["ctl", *arguments, "--endpoint", daemon.endpoint])
        assert end.value.code == code, out.getvalue() + err.getvalue()
        return Result(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def ranks(start_rank: StartRank, ctl: Ctl) -> list[Rank]:
    """Two ranks of one job, connected and ready to train."""
    started = [start_rank(number, **TRAINS, **PATIENT) for number in range(2)]
    assert [rank.hear() for rank in started] == ["ready", "ready"]
    until(lambda: len(connected(ctl)) == 2)
    return started


def ctl_process(daemon: Daemon, *arguments: str) -> subprocess.Popen[str]:
    """A `capd ctl` that goes on beside the test."""
    command = [sys.executable, "-m", "capd", "ctl", *arguments, "--endpoint", daemon.endpoint]
    return forking.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def status(ctl: Ctl) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ctl("status", "--json").json
    return found


def connected(ctl: Ctl) -> list[dict[str, Any]]:
    """The ranks that have found the daemon by now."""
    try:
        return status(ctl)
    except AssertionError:  # none of them yet
        return []


def order(ctl: Ctl, ranks: Iterable[Rank], *arguments: str, steps: int = 2) -> None:
    """Give an order, let every rank hear of it, and train on."""
    ctl(*arguments, "--no-wait")
    until(lambda: all(rank["received"] for rank in status(ctl)))
    train(ranks, steps)


def train(ranks: Iterable[Rank], steps: int) -> None:
    for rank in ranks:
        rank.tell(f"train {steps}")
    for rank in ranks:
        rank.hear()


def expected(
    rank: int,
    iterations: Iterable[int],
    *,
    modules: Iterable[str] = WATCHED,
    tensors: Iterable[str] = TENSORS,
    micro_batches: Iterable[int] = range(MICRO_BATCHES),
) -> set[Record]:
    """The records of the watched modules, by the rule: each tensor in every micro-batch, a weight once per step."""
    return {
        (rank, module, tensor_name, iteration, micro_batch)
        for iteration in iterations
        for module in modules
        for tensor_name in tensors
        for micro_batch in micro_batches
        if tensor_name != "weight" or micro_batch == min(micro_batches)
    }


def records(daemon: Daemon) -> tuple[set[Record], set[tuple[int, int]]]:
    """What the store has: the records of modules, and (rank, iteration) of the captured losses."""
    modules: set[Record] = set()
    losses: set[tuple[int, int]] = set()
    for series in capd_package.open(daemon.store / "run.zarr").series:
        key = series.key
        for record in series.records:
            if key.tensor_name == "loss":
                losses.add((key.rank, record.iteration))
            else:
                modules.add((key.rank, key.module, key.tensor_name, record.iteration, record.micro_batch))
    return modules, losses


def leave(ranks: Iterable[Rank]) -> None:
    for rank in ranks:
        rank.leave()


def plain_losses(rank: int, steps: int, job: tuple[str, ...] = TRAIN_JOB) -> list[Any]:
    """What the same job computes without capd."""
    plain = Rank("off", rank, command=job, imports=forking.TRAINING)
    try:
        assert plain.hear() == "ready"
        plain.ask(f"train {steps}")
        losses: list[Any] = plain.ask("losses")
        plain.leave()
        return losses
    finally:
        plain.kill()


def test_a_job_is_stopped_selected_and_started_and_the_store_has_exactly_that(
    daemon: Daemon, ranks: list[Rank], ctl: Ctl
) -> None:
    train(ranks, 2)
    order(ctl, ranks, "stop", "--at", "3")  # 2, 3
    narrow = ["--modules", "head", "--modules", "*.1.2", "--tensors", "input,grad_output"]
    order(ctl, ranks, "select", "--at", "5", *narrow)  # 4, 5
    order(
        ctl, ranks, "select", "--at", "6", "--steps", "7-:2", "--micro-batches", "1", "--ranks", "1"
    )  # 6, 7
    train(ranks, 2)
    order(ctl, ranks, "start", "--at", "10", steps=1)
    order(ctl, ranks, "start", "--at", "11", "--steps", "12", steps=2)
    order(ctl, ranks, "select", "--reset", "--at", "13", steps=1)
    losses = [rank.ask("losses") for rank in ranks]
    ctl("flush")
    assert live_stats(daemon.endpoint)["in_flight"] == 0
    assert ctl("seal").out == "sealed run\n"
    leave(ranks)

    wanted: set[Record] = set()
    for rank in (0, 1):
        wanted |= expected(rank, (0, 1, 2, 10, 12, 13))
        wanted |= expected(rank, (5,), modules=("head", "layers.1.2"), tensors=("input", "grad_output"))
    wanted |= expected(1, (7, 9), micro_batches=(1,))
    found, captured_losses = records(daemon)
    assert found == wanted
    assert captured_losses == {(rank, n) for rank in (0, 1) for n in range(14) if n not in (3, 4)}
    stats = live_stats(daemon.endpoint)
    assert stats["dropped"] == {"stopped": 4}
    assert stats["offered"] == stats["committed"] + 4
    assert losses == [plain_losses(rank, 14) for rank in (0, 1)]


@pytest.mark.slow
def test_a_training_job_is_stopped_where_the_command_says(
    daemon: Daemon, ranks: list[Rank], ctl: Ctl
) -> None:
    for rank in ranks:
        assert rank.ask("run") == "running"
    until(lambda: all((rank["iteration"] or 0) > 5 for rank in status(ctl)))

    stopped = ctl("stop", "--json").json
    again = ctl("start", "--json").json
    last = [rank.ask("halt") for rank in ranks]
    leave(ranks)

    found, losses = records(daemon)
    for rank in (0, 1):
        gap = range(stopped[rank]["since"], again[rank]["since"])
        assert len(gap) > 0
        iterations = [n for n in range(last[rank]) if n not in gap]
        assert {record for record in found if record[0] == rank} == expected(rank, iterations)
        assert {n for number, n in losses if number == rank} == set(iterations)
        assert stopped[rank]["in_force"]["from_iteration"] <= stopped[rank]["since"]
        assert stopped[rank]["capturing"] is False


def contents(daemon: Daemon) -> list[dict[tuple[Any, ...], tuple[Any, ...]]]:
    """What each rank of the compiled job gave: by names and moment, the record with its elements."""
    found: list[dict[tuple[Any, ...], tuple[Any, ...]]] = [{} for _ in WAYS]
    for series in capd_package.open(daemon.store / "run.zarr").series:
        key = series.key
        names = (key.module, key.tensor_name, key.layer, key.phase, key.operation, key.layer_type)
        for i, record in enumerate(series.records):
            at = (record.iteration, record.micro_batch, record.call, *names)
            assert at not in found[key.rank]
            found[key.rank][at] = (record.metadata, record.shape, series.numpy(i).tobytes())
    return found


@pytest.mark.fault
def test_compiled_ranks_follow_as_uncompiled_ones_and_compile_nothing_for_it(
    daemon: Daemon, start_rank: StartRank, ctl: Ctl
) -> None:
    jobs = [(sys.executable, COMPILED_JOB, way) for way in WAYS]
    ranks = [
        start_rank(number, command=job, CAPD_MODE="sample:1/2", **PATIENT) for number, job in enumerate(jobs)
    ]
    assert [rank.hear() for rank in ranks] == ["ready"] * len(WAYS)
    until(lambda: len(connected(ctl)) == len(WAYS))
    train(ranks, 2)
    graphs = [rank.ask("graphs") for rank in ranks]
    order(ctl, ranks, "stop", "--at", "3")  # 2, 3
    narrow = ["--modules", "1.*", "--tensors", "grad_output,grad_weight"]
    order(ctl, ranks, "select", "--at", "5", *narrow)  # 4, 5
    order(ctl, ranks, "select", "--at", "6", "--steps", "7-:2", "--micro-batches", "1")  # 6, 7
    order(ctl, ranks, "start", "--at", "8", steps=1)
    for rank in ranks:
        assert rank.ask("run") == "running"
    stopped, again = ctl("stop", "--json").json, ctl("start", "--json").json
    until(lambda: all(rank["iteration"] > max(r["since"] for r in again) for rank in status(ctl)))
    last = [rank.ask("halt") for rank in ranks]
    losses = [rank.ask("losses") for rank in ranks]
    assert graphs[0] == 0 < graphs[1] < graphs[2]
    assert [rank.ask("graphs") for rank in ranks] == graphs
    leave(ranks)

    gaps = [range(stopped[n]["since"], again[n]["since"]) for n in range(len(WAYS))]
    assert all(gaps)
    found = contents(daemon)
    for n, held in enumerate(found):
        captured = {i for i in range(last[n]) if i not in (3, 4) and i not in gaps[n]}
        assert {(at[0], at[1]) for at in held if not at[3]} == {(i, i % 2) for i in captured}
        assert {(at[0], at[1]) for at in held if at[3]} == {(i, i % 2) for i in captured - {6}}
    common = set(range(min(last))).difference(*gaps)
    eager, whole, blocks = ({at: v for at, v in one.items() if at[0] in common} for one in found)
    assert whole == eager
    assert blocks == eager
    assert losses == [plain_losses(n, last[n], job) for n, job in enumerate(jobs)]


@pytest.mark.fault
def test_a_rank_that_hangs_in_a_step_is_named_and_follows_later(
    daemon: Daemon, ranks: list[Rank], ctl: Ctl
) -> None:
    train(ranks, 1)
    assert ranks[1].ask("hang") == "hanging"

    train(ranks[:1], 1)
    process = ctl_process(daemon, "stop", "--at", "2", "--timeout", "2")
    until(lambda: all(rank["received"] for rank in status(ctl)))
    train(ranks[:1], 2)
    out, err = process.communicate(timeout=60)

    assert process.returncode == 1
    assert "rank 0: nothing from iteration 2 on" in out
    assert "rank 1: nothing from iteration 2 (now in iteration 1)" in out
    assert "rank 1 (in iteration 1)" in err
    assert "rank 0" not in err

    assert ranks[1].ask("go") == 2
    train(ranks[1:], 1)
    until(lambda: [rank["since"] for rank in status(ctl)] == [2, 2])
    leave(ranks)
    assert records(daemon)[0] == expected(0, range(2)) | expected(1, range(2))


@pytest.mark.fault
def test_a_rank_that_comes_later_does_not_begin_to_capture(
    daemon: Daemon, ranks: list[Rank], ctl: Ctl, start_rank: StartRank
) -> None:
    train(ranks[:1], 1)
    order(ctl, ranks, "stop", "--at", "1", steps=2)
    later = start_rank(2, **TRAINS)
    assert later.hear() == "ready"
    until(lambda: [rank["received"] for rank in status(ctl)] == [True] * 3)
    train([later], 2)
    until(lambda: status(ctl)[2]["since"] == 0)
    leave([*ranks, later])

    assert records(daemon)[0] == expected(0, (0,)) | expected(1, (0,))


@pytest.mark.fault
def test_a_daemon_started_anew_learns_from_its_ranks_and_tells_the_others(
    daemon: Daemon, ranks: list[Rank], ctl: Ctl, start_rank: StartRank
) -> None:
    train(ranks, 1)
    order(ctl, ranks, "select", "--modules", "head", "--at", "1", steps=1)
    ctl("flush")
    daemon.kill()
    train(ranks, 1)
    daemon.start()
    until(lambda: [rank["since"] for rank in connected(ctl)] == [1, 1])
    later = start_rank(2, **TRAINS)
    assert later.hear() == "ready"
    until(lambda: [rank["received"] for rank in status(ctl)] == [True] * 3)
    train([later], 1)
    assert all(rank["in_force"]["selection"]["modules"] == ["head"] for rank in status(ctl)[:2])
    leave([*ranks, later])

    wanted = expected(2, (0,), modules=("head",))
    for rank in (0, 1):
        wanted |= expected(rank, (0,)) | expected(rank, (1, 2), modules=("head",))
    assert records(daemon)[0] == wanted


@pytest.mark.slow
def test_status_says_how_each_rank_is_steered(daemon: Daemon, ranks: list[Rank], ctl: Ctl) -> None:
    before = status(ctl)
    assert [rank["rank"] for rank in before] == [0, 1]
    assert [rank["iteration"] for rank in before] == [None, None]
    assert all(rank["connected"] and rank["capturing"] and rank["in_force"] is None for rank in before)

    train(ranks, 1)
    ctl("select", "--steps", "5-", "--at", "7", "--no-wait")
    until(lambda: all(rank["received"] for rank in status(ctl)))
    found = status(ctl)[1]
    assert found["iteration"] == 0
    assert found["in_force"] is None
    assert found["pending"] == {
        "from_iteration": 7,
        "capturing": True,
        "selection": {"steps": "5-", "micro_batches": None, "ranks": None, "modules": None, "tensors": None},
    }
    text = ctl("status").out
    assert "run run" in text
    assert "steps 5- from iteration 7" in text
    leave(ranks)


@pytest.mark.slow
def test_what_cannot_be_done_is_said_with_its_exit_code(
    daemon: Daemon, ranks: list[Rank], ctl: Ctl, start_rank: StartRank
) -> None:
    assert "as a range" in ctl("select", "--steps", "soon", code=2).err
    assert "known: input, weight" in ctl("select", "--tensors", "inptu", code=2).err
    assert "1 to 256 printable characters" in ctl("select", "--modules", "x" * 300, code=2).err
    assert "--reset" in ctl("select", code=2).err
    assert "'other'" in ctl("stop", "--run-id", "other", code=5).err
    assert all(rank["pending"] is None for rank in status(ctl))

    for rank in ranks:
        rank.ask("run")
    assert "has such a name" in ctl("select", "--modules", "nowhere.*", code=5).err
    assert "ranks 7" in ctl("select", "--ranks", "7", code=5).err
    assert "end before" in ctl("select", "--steps", "0", code=5).err
    for rank in ranks:
        rank.ask("halt")

    second = start_rank(0, run_id="second")
    assert second.ask("counters")["offered"] == 0
    second.ask("capture 0 1")
    until(lambda: "several runs are live: run, second" in ctl_any(daemon, "status"))
    second.leave()
    leave(ranks)


def ctl_any(daemon: Daemon, *arguments: str) -> str:
    """What a `capd ctl` says on stderr, however it ends."""
    return ctl_process(daemon, *arguments).communicate(timeout=60)[1]


def test_captures_that_name_their_own_iteration_are_steered_by_it(
    daemon: Daemon, start_rank: StartRank, ctl: Ctl
) -> None:
    rank = start_rank()
    rank.ask("capture 0 4")
    assert rank.ask("flush")  # so it has found the daemon
    ctl("stop", "--at", "6", "--no-wait")
    until(lambda: status(ctl)[0]["received"])
    rank.ask("capture 4 9")
    until(lambda: status(ctl)[0]["since"] == 6)
    ctl("start", "--at", "11", "--no-wait")
    until(lambda: status(ctl)[0]["received"])
    rank.ask("capture 9 12")
    counters = rank.ask("counters")
    rank.leave()

    assert counters["dropped"] == {"stopped": 5}
    stored = [r.iteration for s in capd_package.open(daemon.store / "run.zarr").series for r in s.records]
    assert sorted(stored) == [0, 1, 2, 3, 4, 5, 11]


HOSTILE = (
    encode(Control("explode")),  # type: ignore[arg-type]
    encode(Control("select", selection={"steps": 3})),  # type: ignore[arg-type]
    encode(Control("select", selection={"code": "import os"})),  # type: ignore[arg-type]
    encode(Control("select", selection={"modules": ["*"] * 65})),  # type: ignore[arg-type]
    encode(Control("select", selection={"modules": ["x" * 257]})),  # type: ignore[arg-type]
    encode(Control("stop", from_iteration=-1)),
    encode(Control("stop", wait_s=1e9)),
    encode(Control("stop", wait_s=float("nan"))),
    encode(Control("stop", run_id="x" * 300)),
    b"\xc1",
    b"x" * (1 << 20),
    b"x" * ((1 << 20) + 1),
)


def test_a_hostile_control_message_ends_its_connection_at_most(
    daemon: Daemon, start_rank: StartRank, ctl: Ctl
) -> None:
    rank = start_rank(**PATIENT)
    rank.ask("capture 0 1")
    until(lambda: len(connected(ctl)) == 1)

    for frame in HOSTILE:
        with daemon_kit.tool(daemon.socket) as tool:
            with contextlib.suppress(BrokenPipeError):  # of the oversize one only the length is read
                tool.send_bytes(frame)
            answer = daemon_kit.receive(tool)
            assert isinstance(answer, Reject), frame[:80]
        assert all(rank["connected"] and rank["pending"] is None for rank in status(ctl))

    with daemon_kit.tool(daemon.socket) as tool:
        for selection in (
            Selection(steps="__import__('os')"), Selection(modules=("\x00",)), Selection(tensors=("x",)),
        ):  # fmt: skip
            tool.send_bytes(encode(Control("select", selection=selection)))
            answer = daemon_kit.receive(tool)
            assert isinstance(answer, ControlReply)
            assert answer.code == "usage"
    assert status(ctl)[0]["pending"] is None
    rank.leave()
