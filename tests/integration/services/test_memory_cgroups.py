"""Who pays for an arena, by the memory control groups of a rank and its daemon: always the rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from capd_client.protocol.counter_page import PAGE_NBYTES, DropReason
from capd_client.protocol.key import Moment
from capd_client.protocol.messages import Descriptor, Put
from tests.kit.daemon import Rank as PlainRank
from tests.kit.daemon import wait_for
from tests.kit.processes import Daemon, Rank

MIB = 1 << 20


class Group:
    """A memory control group of the test's own, of either version of the kernel's interface."""

    def __init__(self, parent: Path, name: str) -> None:
        self.path = parent / f"capd-test-{os.getpid()}-{name}"
        self.path.mkdir()

    def prefix(self) -> tuple[str, ...]:
        """The beginning of a command that runs in the group."""
        return ("sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh")

    def take(self, pid: int) -> None:
        """Move a process into the group. What it has touched before stays where it is."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def shared_nbytes(self) -> int:
        """The bytes of shared memory that the group pays for."""
        for line in (self.path / "memory.stat").read_text().splitlines():
            if line.startswith("shmem "):
                return int(line.split()[1])
        raise AssertionError("no shmem in memory.stat")

    def remove(self) -> None:
        """Remove the group, which is empty."""

        def removed() -> bool:
            with contextlib.suppress(OSError):
                self.path.rmdir()
            return not self.path.exists()

        wait_for(removed, "the end of the group")


@pytest.fixture
def groups() -> Iterator[tuple[Group, Group]]:
    """One of a rank, one of a daemon."""
    root = Path("/sys/fs/cgroup")
    parent = root / "memory" if (root / "memory").is_dir() else root
    made: list[Group] = []
    try:
        try:
            made += [Group(parent, "rank"), Group(parent, "daemon")]
            made[0].shared_nbytes()
        except (OSError, AssertionError) as error:
            pytest.skip(f"no memory control group can be made here: {error}")
        yield made[0], made[1]
    finally:
        for group in made:
            group.remove()


def test_the_rank_pays_for_its_arena_until_the_daemon_lets_a_dead_ranks_go(
    groups: tuple[Group, Group], tmp_path: Path, runtime_dir: Path
) -> None:
    of_rank, of_daemon = groups
    daemon = Daemon(tmp_path / "store", runtime_dir, prefix=of_daemon.prefix()).start()
    rank = Rank(daemon.endpoint)
    try:
        # It has no arena before its first capture.
        of_rank.take(rank.process.pid)
        rank.ask("capture 0 200")
        assert rank.ask("flush 60")
        assert of_rank.shared_nbytes() > MIB
        assert of_daemon.shared_nbytes() < MIB

        rank.kill()
        # Its pages stay charged to its group, as long as a process maps them.
        wait_for(lambda: of_rank.shared_nbytes() < 64 << 10, "the memory of the dead rank", 20)
        assert of_daemon.shared_nbytes() < MIB
    finally:
        rank.kill()
        daemon.stop()


@pytest.mark.slow
def test_a_hole_in_an_arena_costs_the_daemons_group_nothing(
    groups: tuple[Group, Group], tmp_path: Path, runtime_dir: Path
) -> None:
    _, of_daemon = groups
    daemon = Daemon(tmp_path / "store", runtime_dir, prefix=of_daemon.prefix()).start()
    nbytes = 1 << 30
    hostile = PlainRank(daemon.socket, arena_nbytes=nbytes + MIB)
    try:
        hostile.connect()
        hostile.send(Put([Descriptor(1, 2 * PAGE_NBYTES, nbytes, 0, (nbytes // 2,), Moment())]))
        hostile.listen_until(lambda: hostile.nacked, "a refusal")
        assert hostile.nacked[1][0] is DropReason.BAD_DESCRIPTOR
        assert of_daemon.shared_nbytes() < MIB
    finally:
        hostile.close()
        daemon.stop()
