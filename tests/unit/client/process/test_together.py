"""What the ranks of a node say alike is one line, and nothing that one of them says is lost. Real processes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from capd_client.process.ranks import RankInfo
from capd_client.process.together import Together
from tests.kit.processes import until

HEAD = """
import os, signal, sys
from capd_client.process import log
rank = int(os.environ["RANK"])
log.show(os.environ.get("LEVEL", "INFO"))
told = log.RateLimitedLog()
open(os.environ["READY"], "w").close()
sys.stdin.readline()
"""
WAIT = "\nsys.stdin.read()\n"


class Ranks:
    """Processes with the variables of torchrun that run a script together and wait before they end."""

    def __init__(self, log: Path, world: int, script: str, *, nodes: int = 1, **environment: str) -> None:
        self._log = log
        self.processes = []
        with log.open("ab") as output:
            for rank in range(world):
                local = world // nodes
                variables = {
                    "RANK": str(rank), "LOCAL_RANK": str(rank % local), "WORLD_SIZE": str(world),
                    "LOCAL_WORLD_SIZE": str(local), "PYTHONPATH": str(Path(__file__).parents[4]),
                }  # fmt: skip
                ready = log.with_name(f"ready-{rank}")
                ready.unlink(missing_ok=True)
                command = [sys.executable, "-c", HEAD + script + WAIT]
                environ = {**os.environ, **variables, **environment, "READY": str(ready)}
                self.processes.append(
                    subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stderr=output)
                )

        until(lambda: all(log.with_name(f"ready-{rank}").exists() for rank in range(world)), 60)
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()

    @property
    def said(self) -> list[str]:
        return sorted(self._log.read_text().splitlines())

    def end(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            process.wait(30)


@contextlib.contextmanager
def ranks(directory: Path, world: int, script: str, *, nodes: int = 1, **environment: str) -> Iterator[Ranks]:
    started = Ranks(directory / "log", world, script, nodes=nodes, **environment)
    try:
        yield started
    finally:
        started.end()


def test_what_all_ranks_say_is_one_line_and_what_some_say_names_them(tmp_path: Path) -> None:
    script = """
told.info("all of %d", 8)
told.info("layers of %d", rank // 2)
if rank == 3:
    told.warn("reason", "mine")
if rank in (1, 4, 5, 6):
    told.warn("other", "some")
"""
    expected = [
        *(f"capd: ranks {at}-{at + 1}: layers of {at // 2}" for at in range(0, 8, 2)),
        "capd: rank 3: mine",
        "capd: ranks 0-7: all of 8",
        "capd: ranks 1, 4-6: some",
    ]

    with ranks(tmp_path, 8, script) as started:
        until(lambda: len(started.said) >= len(expected))

    assert started.said == sorted(expected)


def test_each_node_speaks_for_its_own_and_one_process_for_itself(tmp_path: Path) -> None:
    script = "told.info('here')"
    with ranks(tmp_path, 2, script, nodes=2) as started:
        until(lambda: len(started.said) >= 2)
    assert started.said == ["capd: rank 0: here", "capd: rank 1: here"]

    (tmp_path / "log").unlink()
    with ranks(tmp_path, 1, script) as started:
        until(lambda: started.said)
    assert started.said == ["capd: here"]


def test_debug_shows_every_line_of_every_rank_at_once(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, "told.info('here'); told.debug('more')", LEVEL="DEBUG") as started:
        until(lambda: len(started.said) >= 6)

    assert started.said == [f"capd: rank {rank}: {text}" for rank in range(3) for text in ("here", "more")]


def test_lines_below_the_level_of_a_rank_are_not_said(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, "told.info('quiet'); told.warn('r', 'loud')", LEVEL="WARNING") as started:
        until(lambda: started.said)

    assert started.said == ["capd: ranks 0-1: loud"]


def test_a_killed_rank_has_said_what_it_handed_over(tmp_path: Path) -> None:
    script = """
told.info("here")
if rank == 2:
    sys.stdin.readline()
    told.warn("last", "last words")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with ranks(tmp_path, 3, script) as started:
        until(lambda: started.said == ["capd: ranks 0-2: here"])  # so rank 0 listens
        started.processes[2].communicate(b"\n", 30)
        until(lambda: len(started.said) > 1)

    assert started.said == ["capd: rank 2: last words", "capd: ranks 0-2: here"]
    assert started.processes[2].returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "end", ["told.warn('r', 'end')", "import atexit; atexit.register(told.warn, 'r', 'end')"]
)
def test_what_is_said_last_is_said_at_the_end_of_the_process(end: str, tmp_path: Path) -> None:
    """Whichever of the ranks ends first: nobody waits for the others, and nothing is lost or said twice."""
    with ranks(tmp_path, 2, f"{end}\nsys.exit(0)") as started:
        pass

    lines = started.said
    assert lines in (["capd: ranks 0-1: end"], ["capd: rank 0: end", "capd: rank 1: end"])


def test_where_rank_0_says_nothing_the_others_say_their_own(tmp_path: Path) -> None:
    with ranks(tmp_path, 3, "rank and told.info('here')") as started:
        until(lambda: len(started.said) >= 2)

    assert started.said == ["capd: rank 1: here", "capd: rank 2: here"]


def test_a_forked_child_speaks_for_itself_and_leaves_the_lines_to_its_parent(tmp_path: Path) -> None:
    script = """
told.info("before")
if os.fork() == 0:
    told.info("in a child")
    os._exit(0)
os.wait()
told.info("after")
"""
    expected = [*(f"capd: rank {rank}: in a child" for rank in range(2)), *(
        f"capd: ranks 0-1: {when}" for when in ("after", "before")
    )]  # fmt: skip
    with ranks(tmp_path, 2, script) as started:
        until(lambda: len(started.said) >= 4)

    assert started.said == expected


def test_a_name_that_is_taken_costs_nothing_but_the_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another user, or of one that never takes what it is handed."""
    said: list[str] = []
    monkeypatch.setattr("capd_client.process.together.node_job", lambda: f"test-{os.getpid()}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.bind(f"\0capd-{os.getuid()}-test-{os.getpid()}")
        squatter.listen(1)
        together = Together(lambda _, text: said.append(text))
        together.log(RankInfo(0, 2, 0, 2), logging.INFO, "here")
        together.end()

    assert said == ["rank 0: here"]
