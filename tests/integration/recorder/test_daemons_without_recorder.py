"""A run whose daemons differ: one with a recorder ends, and the next one has none."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.recorder.test_holding import K, SteppingRank, kept_iterations, ledger, serve
from tests.kit.daemon import DaemonProcess, daemons, wait_for


@pytest.fixture
def made() -> Iterator[list[DaemonProcess]]:
    """Daemons that do not outlive the test."""
    with daemons() as made:
        yield made


def rank_of_six_steps(tmp_path: Path, made: list[DaemonProcess]) -> SteppingRank:
    made.append(daemon := serve(tmp_path, memory="0"))
    rank = SteppingRank(daemon.path)
    rank.connect()
    for iteration in range(6):
        rank.step(iteration)
    wait_for(lambda: daemon.run_stats("run")["window"]["iterations"] <= K, "old iterations leave")
    return rank


def go_on_without(tmp_path: Path, made: list[DaemonProcess], rank: SteppingRank) -> DaemonProcess:
    """Start a daemon without a recorder, to which the rank comes, and let it train."""
    rank.disconnect()
    made.append(plain := DaemonProcess(tmp_path / "store", tmp_path / "sock-plain"))
    rank.path = plain.path
    rank.connect()
    rank.acked.clear()
    rank.step(6)
    return plain


def end(plain: DaemonProcess, rank: SteppingRank) -> tuple[int, int, int, dict[str, int]]:
    rank.bye()
    rank.close()
    wait_for(lambda: not plain.run_stats("run")["in_flight"], "all is settled")
    stats = plain.run_stats("run")
    assert plain.stop() == 0
    return ledger(stats)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_daemon_without_a_recorder_settles_what_a_killed_one_held(
    tmp_path: Path, made: list[DaemonProcess], is_kept: bool
) -> None:
    rank = rank_of_six_steps(tmp_path, made)
    if is_kept:
        made[0].process.send_signal(signal.SIGSTOP)
        (keeps := tmp_path / "store/run.zarr/.capd/node=n/window/keeps.jsonl").parent.mkdir(exist_ok=True)
        keeps.write_text(
            '{"time_ns":1,"reason":"r","attempt":0,"iteration":5,"first":2,"last":5,"node":"n"}\n'
        )
    made[0].stop(signal.SIGKILL)
    plain = go_on_without(tmp_path, made, rank)
    found = end(plain, rank)

    run = tmp_path / "store" / "run.zarr"
    if is_kept:
        assert found == (21, 15, 0, {"expired": 6})
        assert kept_iterations(run) == [2, 3, 4, 5, 6]
    else:
        assert found == (21, 3, 0, {"expired": 18})
        assert kept_iterations(run) == [6]
    assert not list(tmp_path.rglob("*.held"))


def test_what_was_let_go_is_known_to_a_daemon_without_a_recorder(
    tmp_path: Path, made: list[DaemonProcess]
) -> None:
    rank = rank_of_six_steps(tmp_path, made)
    made[0].stop()
    plain = go_on_without(tmp_path, made, rank)
    assert plain.run_stats("run")["window"]["keeps_total"] == 1
    assert end(plain, rank) == (21, 15, 0, {"expired": 6})


def test_a_daemon_of_a_store_without_a_recorder_shows_none(tmp_path: Path, made: list[DaemonProcess]) -> None:
    made.append(plain := DaemonProcess(tmp_path / "store", tmp_path / "sock"))
    rank = SteppingRank(plain.path)
    rank.connect()
    rank.step(0)
    assert plain.run_stats("run")["window"] is None
    rank.bye()
    rank.close()
