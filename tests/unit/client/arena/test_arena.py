"""The arena: sealed, private to this process's life, sized by what the machine has to give."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from pathlib import Path

import pytest

from capd_client.arena.arena import STEP_NBYTES, Arena
from capd_client.errors import ArenaError
from capd_client.process.memory import (
    MAX_ARENA_NBYTES,
    MIN_ARENA_NBYTES,
    available_nbytes,
    default_arena_nbytes,
    most_arena_nbytes,
)

GET_SEALS = 1034
SEAL, SHRINK, GROW = 0x1, 0x2, 0x4


def mappings() -> str:
    return Path("/proc/self/maps").read_text()


def mapped_inodes() -> set[int]:
    """By which one arena is told from others: a session whose device may still write to its own leaves it mapped."""
    return {int(line.split()[4]) for line in mappings().splitlines() if "capd-arena" in line}


def test_size_cannot_change_and_no_seal_can_be_added() -> None:
    arena = Arena(1 << 20)
    try:
        assert fcntl.fcntl(arena.fd, GET_SEALS) & (SEAL | SHRINK | GROW) == SEAL | SHRINK | GROW
        for nbytes in (0, 1 << 19, 1 << 21):
            with pytest.raises(PermissionError):
                os.ftruncate(arena.fd, nbytes)
        assert os.fstat(arena.fd).st_size == arena.nbytes
    finally:
        arena.close()


def test_written_bytes_are_seen_through_the_descriptor() -> None:
    arena = Arena(1 << 20)
    try:
        ctypes.memmove(arena.address + 5000, b"tensor", 6)
        arena.words[3] = 2**63
        with mmap.mmap(arena.fd, arena.nbytes, mmap.MAP_SHARED, mmap.PROT_READ) as other:
            assert other[5000:5006] == b"tensor"
            assert int.from_bytes(other[24:32], "little") == 2**63
    finally:
        arena.close()


def test_close_leaves_neither_mapping_nor_descriptor() -> None:
    arena = Arena(3 << 20)
    fd, inode = arena.fd, os.fstat(arena.fd).st_ino
    arena.grow(arena.nbytes)
    assert inode in mapped_inodes()

    arena.close()
    arena.close()

    assert inode not in mapped_inodes()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_prefaulting_makes_every_page() -> None:
    arena = Arena(9 << 20)
    try:
        arena.grow(arena.nbytes)
        assert arena.prefaulted(timeout_s=30)
        assert os.fstat(arena.fd).st_blocks * 512 == arena.nbytes - arena.start
    finally:
        arena.close()


def test_pages_come_in_steps_and_only_as_far_as_asked_for() -> None:
    arena = Arena(3 * STEP_NBYTES)
    try:
        for asked, there in ((1, STEP_NBYTES), (STEP_NBYTES + 1, 2 * STEP_NBYTES), (1, 2 * STEP_NBYTES)):
            arena.grow(asked)
            assert arena.prefaulted(timeout_s=30)
            assert (
                os.fstat(arena.fd).st_blocks * 512
                == there
                == arena.populated - arena.start
                == arena.target - arena.start
            )
    finally:
        arena.close()


def noted(arena: Arena) -> list[tuple[str, frozenset[int]]]:
    """In which thread, and on which CPUs, each piece of pages is made from now on."""
    found: list[tuple[str, frozenset[int]]] = []
    make = arena._libc.madvise

    def madvise(*args: int) -> int:
        found.append((threading.current_thread().name, frozenset(os.sched_getaffinity(0))))
        return int(make(*args))

    arena._libc.madvise = madvise
    return found


@pytest.mark.parametrize("foreign", [False, True])
def test_pages_are_made_on_the_cpus_near_the_device_by_one_thread_alone(foreign: bool) -> None:
    allowed = os.sched_getaffinity(0)
    near = frozenset({min(allowed), 1 << 16})  # the second one is not this process's
    arena = Arena(8 << 20)
    try:
        made = noted(arena)
        arena.near(frozenset({1 << 16}) if foreign else near)
        arena.grow(arena.nbytes)
        assert arena.prefaulted(30)
        assert set(made) == {("capd-prefault", frozenset(allowed if foreign else {min(allowed)}))}
        assert os.sched_getaffinity(0) == allowed
    finally:
        arena.close()


def test_a_system_that_keeps_no_thread_to_cpus_makes_the_pages_anyway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    arena = Arena(4 << 20)
    try:
        arena.near(frozenset(os.sched_getaffinity(0)))
        arena.grow(arena.nbytes)
        assert arena.prefaulted(30)
        assert arena.populated == arena.nbytes
    finally:
        arena.close()


def test_a_device_that_is_known_late_gets_the_pages_that_are_made_from_then_on() -> None:
    allowed = os.sched_getaffinity(0)
    arena = Arena(32 << 20)
    try:
        made = noted(arena)
        make, begun, known = arena._libc.madvise, threading.Event(), threading.Event()

        def madvise(*args: int) -> int:
            begun.set()
            assert known.wait(30)
            return int(make(*args))

        arena._libc.madvise = madvise
        arena.grow(arena.nbytes)
        assert begun.wait(30)
        arena.near(frozenset({min(allowed)}))
        known.set()
        assert arena.prefaulted(30)
        assert [cpus for _, cpus in made[:2]] == [frozenset(allowed), frozenset({min(allowed)})]
    finally:
        arena.close()


def test_fresh_memory_comes_at_the_same_address_with_the_head_and_without_pages() -> None:
    arena = Arena(2 * STEP_NBYTES)
    try:
        arena.grow(arena.nbytes)
        assert arena.prefaulted(timeout_s=30)
        arena.words[7] = 99
        ctypes.memmove(arena.address + 5000, b"tensor", 6)
        ctypes.memmove(arena.address + 8192, b"journal", 7)
        address, old = arena.address, os.fstat(arena.fd).st_ino
        announced: list[int] = []
        arena.unload()
        assert ctypes.string_at(arena.address + 5000, 6) == b"tensor"  # only out of the tables

        arena.replace([(0, 4096), (8192, 6)], announced.append)
        arena.free_old()

        assert announced == [arena.fd]
        assert arena.address == address
        assert old not in mapped_inodes()
        assert os.fstat(arena.fd).st_ino in mapped_inodes() - {old}
        assert os.fstat(arena.fd).st_blocks * 512 == 2 * 4096
        assert arena.words[7] == 99
        assert ctypes.string_at(arena.address + 5000, 6) == bytes(6)
        assert ctypes.string_at(arena.address + 8192, 7) == b"journal"[:6] + bytes(1)
        assert fcntl.fcntl(arena.fd, GET_SEALS) & (SEAL | SHRINK | GROW) == SEAL | SHRINK | GROW
        ctypes.memmove(arena.address + 5000, b"second", 6)
        assert os.pread(arena.fd, 6, 5000) == b"second"
        arena.grow(STEP_NBYTES)
        assert arena.prefaulted(timeout_s=30)
        assert os.fstat(arena.fd).st_blocks * 512 == 3 * 4096 + STEP_NBYTES
        child = os.fork()
        if child == 0:
            arena.close_in_child()
            os._exit("capd-arena" in mappings())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        arena.close()


def test_memory_that_cannot_be_announced_is_not_taken() -> None:
    arena = Arena(1 << 20)
    before = len(os.listdir("/proc/self/fd"))
    try:
        ctypes.memmove(arena.address + 5000, b"tensor", 6)
        fd, inode = arena.fd, os.fstat(arena.fd).st_ino

        def refuse(_: int) -> None:
            raise BrokenPipeError

        with pytest.raises(BrokenPipeError):
            arena.replace([(0, 4096)], refuse)
        assert (arena.fd, os.fstat(fd).st_ino) == (fd, inode)
        assert ctypes.string_at(arena.address + 5000, 6) == b"tensor"
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        arena.close()


def test_a_forked_child_has_neither_the_mapping_nor_after_its_handler_the_descriptor() -> None:
    arena = Arena(1 << 20)
    try:
        child = os.fork()
        if child == 0:
            arena.close_in_child()
            clean = "capd-arena" not in mappings() and not any(
                "capd-arena" in os.readlink(f"/proc/self/fd/{fd}")
                for fd in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{fd}")
            )
            os._exit(0 if clean else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.fstat(arena.fd).st_size == arena.nbytes
    finally:
        arena.close()


def test_a_size_no_kernel_maps_is_an_arena_error_and_leaks_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(ArenaError):
        Arena(1 << 60)

    assert len(os.listdir("/proc/self/fd")) <= before  # garbage of earlier tests may go meanwhile


def test_the_arena_takes_a_fifth_of_the_memory_over_the_ranks() -> None:
    assert default_arena_nbytes(1, available=5 << 30) == 1 << 30
    assert default_arena_nbytes(4, available=5 << 30) == 1 << 28
    assert default_arena_nbytes(1, available=1 << 50) == MAX_ARENA_NBYTES
    assert default_arena_nbytes(8, available=0) == MIN_ARENA_NBYTES
    assert default_arena_nbytes(1) >= MIN_ARENA_NBYTES


def test_an_arena_that_is_asked_for_takes_half_of_the_memory_over_the_ranks_at_most() -> None:
    assert most_arena_nbytes(1, available=6 << 30) == 3 << 30
    assert most_arena_nbytes(4, available=64 << 30) == 8 << 30  # beyond the default's limit
    assert most_arena_nbytes(8, available=0) == MIN_ARENA_NBYTES


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


MEMINFO = "MemTotal:       100 kB\nMemAvailable:   1000 kB\n"


def test_cgroup_2_headroom_counts_at_every_level_and_reclaims_page_cache(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/step/memory.current": "5\n",
            "sys/fs/cgroup/job/memory.max": "300000\n",
            "sys/fs/cgroup/job/memory.current": "200000\n",
            "sys/fs/cgroup/job/memory.stat": "anon 5\ninactive_file 50000\n",
        },
    )
    assert available_nbytes(root) == 150_000


def test_cgroup_1_headroom_is_respected(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:cpu,cpuacct:/a\n7:memory:/docker/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "90000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "20000\n",
        },
    )
    assert available_nbytes(root) == 70_000


def test_without_limits_what_is_available_counts(tmp_path: Path) -> None:
    assert available_nbytes(tree(tmp_path, {"proc/meminfo": MEMINFO})) == 1_024_000
