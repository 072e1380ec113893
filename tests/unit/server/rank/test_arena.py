"""An arena is mapped only if nothing the rank does later can hurt the daemon."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import tempfile
import weakref
from collections.abc import Iterator
from random import Random

import pytest

from capd.errors import ArenaError
from capd.server.rank.arena import MAX_ARENA_NBYTES, Arena
from capd_client.protocol.counter_page import (
    COUNTER_STEPS,
    DROP_REASONS,
    PAGE_NBYTES,
    DropReason,
)
from tests.kit.client.memory import FUTURE_WRITE, NBYTES, SEALS, memfd, write


@pytest.fixture
def sealed() -> Iterator[int]:
    fd = memfd()
    yield fd
    os.close(fd)


@pytest.fixture
def sparse() -> Iterator[int]:
    fd = memfd(holes=True)
    yield fd
    os.close(fd)


def test_a_sealed_memfd_is_mapped_and_shows_later_writes(sealed: int) -> None:
    arena = Arena(sealed, NBYTES)
    write(sealed, b"payload", PAGE_NBYTES + 64)

    part = arena.slice(PAGE_NBYTES + 64, 7)

    assert bytes(part) == b"payload"
    assert part.readonly
    assert len(arena.slice(0, 0)) == 0


def test_counters_come_from_the_page_and_hostile_ones_are_capped(sealed: int) -> None:
    arena = Arena(sealed, NBYTES)
    words = [0] * len(DROP_REASONS)
    words[DROP_REASONS.index(DropReason.TOO_LARGE)] = 2
    words[DROP_REASONS.index(DropReason.INTERNAL)] = 2**64 - 1
    write(sealed, struct.pack(f"{3 + len(words)}Q", 10, 7, 1, *words), 8)

    counters = arena.counters()

    assert counters.offered == 10
    assert counters.dropped[DropReason.TOO_LARGE] == 2
    assert counters.dropped[DropReason.INTERNAL] < 2**63


def test_the_mapping_outlives_the_arena_while_a_job_reads_it(sealed: int) -> None:
    arena = Arena(sealed, NBYTES)
    write(sealed, b"kept", PAGE_NBYTES)
    part, gone = arena.slice(PAGE_NBYTES, 4), weakref.ref(arena)
    mapped = weakref.ref(arena._map)

    del arena
    assert gone() is None
    assert bytes(part) == b"kept"
    del part
    assert mapped() is None


def test_the_same_memory_is_recognised(sealed: int) -> None:
    arena = Arena(sealed, NBYTES)
    again, other = os.dup(sealed), memfd()

    assert arena.is_same_memory(again)
    assert not arena.is_same_memory(other)
    os.close(again)
    os.close(other)


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL, FUTURE_WRITE])
def test_a_missing_seal_is_refused_by_name(missing: int) -> None:
    fd = memfd(seals=SEALS & ~missing)
    with pytest.raises(ArenaError, match="not sealed"):
        Arena(fd, NBYTES)
    os.close(fd)


@pytest.mark.parametrize("announced", [0, PAGE_NBYTES, NBYTES - 1, NBYTES + 1, MAX_ARENA_NBYTES + 1])
def test_a_wrong_size_is_refused(sealed: int, announced: int) -> None:
    with pytest.raises(ArenaError):
        Arena(sealed, announced)


def test_a_foreign_counter_page_is_refused() -> None:
    fd = memfd(magic=1)
    with pytest.raises(ArenaError, match="counter page"):
        Arena(fd, NBYTES)
    os.close(fd)


def test_files_and_sockets_are_refused() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(NBYTES)
        with pytest.raises(ArenaError, match="not"):
            Arena(file.fileno(), NBYTES)
    read_end, write_end = os.pipe()
    with pytest.raises(ArenaError, match="not a memfd"):
        Arena(read_end, NBYTES)
    os.close(read_end)
    os.close(write_end)


def test_the_iterations_begun_have_a_word_of_their_own(sealed: int) -> None:
    arena = Arena(sealed, NBYTES)
    assert arena.begun() == 0
    write(sealed, struct.pack("Q", 41), 8 * COUNTER_STEPS)
    assert arena.begun() == 41
    write(sealed, struct.pack("Q", 2**64 - 1), 8 * COUNTER_STEPS)
    assert arena.begun() == 2**62
    assert sum(arena.counters().dropped.values()) == 0


def blocks(fd: int) -> int:
    """Bytes of the pages that there are."""
    return os.fstat(fd).st_blocks * 512


def test_what_was_never_written_is_told_from_what_was_and_no_page_is_made(sparse: int) -> None:
    arena = Arena(sparse, NBYTES)
    write(sparse, b"x" * 2 * PAGE_NBYTES, 4 * PAGE_NBYTES)
    before = blocks(sparse)

    assert arena.is_written(4 * PAGE_NBYTES, 2 * PAGE_NBYTES)
    assert arena.is_written(5 * PAGE_NBYTES + 1, 1)
    assert arena.is_written(NBYTES - 1, 0)
    assert not arena.is_written(4 * PAGE_NBYTES, 2 * PAGE_NBYTES + 1)
    assert not arena.is_written(4 * PAGE_NBYTES - 1, 2)
    assert not arena.is_written(8 * PAGE_NBYTES, 1)
    assert blocks(sparse) == before

    write(sparse, b"x", 7 * PAGE_NBYTES)
    write(sparse, b"x", 6 * PAGE_NBYTES)  # joins both
    assert arena.is_written(4 * PAGE_NBYTES, 4 * PAGE_NBYTES)


def test_the_ranks_own_place_in_its_descriptor_stays_where_it_is(sparse: int) -> None:
    arena = Arena(sparse, NBYTES)
    os.lseek(sparse, 77, os.SEEK_SET)
    assert arena.is_written(8, 8)
    assert not arena.is_written(9 * PAGE_NBYTES, 8)
    assert os.lseek(sparse, 0, os.SEEK_CUR) == 77


def test_any_order_of_writing_and_asking_tells_the_truth() -> None:
    """More separate ranges than are kept in mind, too."""
    pages = 3 * 4096
    fd = memfd(pages * PAGE_NBYTES, holes=True)
    arena, random, written = Arena(fd, pages * PAGE_NBYTES), Random(1), {0}
    for _ in range(20_000):
        page = random.randrange(pages // 2) * 2 + (random.random() < 0.1)
        if random.random() < 0.5:
            write(fd, b"x", page * PAGE_NBYTES)
            written.add(page)
        count = random.randint(1, min(3, pages - page))
        assert arena.is_written(page * PAGE_NBYTES, count * PAGE_NBYTES) == written.issuperset(
            range(page, page + count)
        )
    os.close(fd)


def test_the_descriptor_it_asks_goes_with_the_arena(sparse: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena(sparse, NBYTES)
    assert arena.is_written(0, 8)
    del arena
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_kernel_that_does_not_tell_holes_is_named(sealed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes with kernels of their own may know no SEEK_HOLE for memfds."""

    def lseek(*_: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as kernel:
        kernel.setattr("capd.server.rank.written.os.lseek", lseek)
        with pytest.raises(ArenaError, match="SEEK_HOLE: Invalid argument"):
            Arena(sealed, NBYTES)


def test_memory_that_is_reserved_but_never_written_counts_as_a_hole() -> None:
    fd = memfd(holes=True, seals=0)
    try:
        os.posix_fallocate(fd, 0, NBYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        arena = Arena(fd, NBYTES)
        assert arena.is_written(0, PAGE_NBYTES)
        assert not arena.is_written(PAGE_NBYTES, 1)
    finally:
        os.close(fd)
