"""How a process that is no child ended, as its pidfd tells."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from capd.server.process import RankProcess, has_ended, how_ended

Start = Callable[[str], tuple["subprocess.Popen[bytes]", int]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a shell command that ends; its process, which nobody has waited for, and a pidfd of it."""
    made: list[tuple[subprocess.Popen[bytes], int]] = []

    def begin(command: str) -> tuple[subprocess.Popen[bytes], int]:
        process = subprocess.Popen(["sh", "-c", command])
        made.append((process, os.pidfd_open(process.pid)))
        select.select([made[-1][1]], [], [])
        assert has_ended(made[-1][1])
        if how_ended(made[-1][1]) == "":
            pytest.skip("the kernel tells how others ended since Linux 6.15")
        return made[-1]

    yield begin
    for process, handle in made:
        process.wait()
        os.close(handle)


@pytest.mark.parametrize(
    ("command", "end"),
    [
        ("exit 0", "exit code 0"),
        ("exit 3", "exit code 3"),
        ("kill -KILL $$", "SIGKILL"),
        ("kill -TERM $$", "SIGTERM"),
        (f"kill -{signal.SIGRTMIN + 1} $$", f"signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_exit_codes_and_signals_are_told_apart(start: Start, command: str, end: str) -> None:
    process, handle = start(command)
    assert how_ended(handle) is None
    process.wait()
    assert how_ended(handle) == end


def test_what_is_no_pidfd_tells_nothing() -> None:
    handle = os.eventfd(1)
    try:
        assert how_ended(handle) == ""
    finally:
        os.close(handle)


def test_an_exit_code_that_nobody_has_collected_may_still_tell_for_a_while(start: Start) -> None:
    process, handle = start("kill -KILL $$")
    rank = RankProcess()
    rank.follow(os.dup(handle))
    rank.lost_at += 1000  # however slow this test is
    assert (rank.end_may_follow, rank.end) == (True, "")
    rank.lost_at -= 2000
    assert not rank.end_may_follow
    rank.lost_at += 1000
    process.wait()
    assert (rank.end_may_follow, rank.end) == (False, "SIGKILL")
    rank.follow(None)
    assert (rank.end_may_follow, rank.end) == (False, "")
