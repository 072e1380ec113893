"""A daemon on a file system that runs out of space or inodes: it stops in time, counts, and goes on when it may."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr

import capd
from capd_client.protocol.counter_page import PAGE_NBYTES, DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define, Descriptor, Put
from tests.kit import checking
from tests.kit import processes as real
from tests.kit.daemon import DaemonProcess, Rank, daemons, wait_for

Mount = Callable[[str], Path]
LARGE_NBYTES = 900 << 10
SMALL_NBYTES = 60 << 10
RNG = np.random.default_rng(11)


@pytest.fixture
def tmpfs(runtime_dir: Path) -> Iterator[Mount]:
    """Mounts a tmpfs with the given options; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        place = runtime_dir / f"disk{len(mounted)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"mode=700,{options}", "capd-test", str(place)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no mount command here")
        if done.returncode != 0:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def serve(runtime_dir: Path, tmpfs: Mount) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons; ends them before their file system is unmounted."""
    with daemons() as made:

        def start(store: Path, *options: str) -> DaemonProcess:
            made.append(DaemonProcess(store, runtime_dir / "s.sock", *options))
            return made[-1]

        yield start


@pytest.fixture
def rank(runtime_dir: Path) -> Iterator[Rank]:
    made = Rank(runtime_dir / "s.sock")
    yield made
    made.close()


def send(rank: Rank, sequence: int, data: bytes, key_id: int = 0) -> bool:
    """One bfloat16 record of raw bytes; whether it was acknowledged. What is refused must be refused as disk_full."""
    rank.memory[PAGE_NBYTES : PAGE_NBYTES + len(data)] = data
    shape = (len(data) // 2,)
    rank.send(Put([Descriptor(sequence, PAGE_NBYTES, len(data), key_id, shape, Moment(iteration=sequence))]))
    rank.listen_until(lambda: sequence in rank.acked or sequence in rank.nacked, f"outcome of {sequence}")
    if sequence in rank.nacked:
        assert rank.nacked[sequence][0] is DropReason.DISK_FULL, rank.nacked[sequence]
    return sequence in rank.acked


def assert_reads(run: Path, held: dict[int, bytes]) -> None:
    """The store holds exactly these records, by sequence, bit for bit."""
    found = {}
    for series in capd.open(run).series:
        for number, record in enumerate(series.records):
            found[record.iteration] = series.numpy(number).tobytes()
    assert found.keys() == held.keys()
    assert found == held


def sealed_records(run: Path) -> int:
    """How many records plain Zarr readers see."""
    return sum(zarr.open_array(path, mode="r").shape[0] for path in run.glob("*/*/*/*/*/data"))


def file_nbytes(place: Path) -> int:
    """Of all files below a place, but for one that is given another name at the moment."""
    total = 0
    for directory, _, names in os.walk(place):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(directory, name)).st_size
    return total


def free_nbytes(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def test_ranks_under_load_stop_before_the_disk_is_full_and_go_on_when_there_is_room(
    tmpfs: Mount, runtime_dir: Path
) -> None:
    disk = tmpfs("size=64m")
    (disk / "ballast").write_bytes(bytes(24 << 20))
    daemon = real.Daemon(disk / "store", runtime_dir, "--keep-free", "25%", "--max-disk", "1GB").start()
    rank = real.Rank(daemon.endpoint)
    try:
        rank.ask("capture 0 600")  # about 40 MB, and 24 MiB may be used
        assert rank.ask("flush 60")
        first = rank.ask("counters")
        checking.assert_balanced(first)
        assert first["dropped"].keys() == {"disk_full"}
        assert first["committed"] > 100
        assert (
            free_nbytes(disk) > 8 << 20
        )  # what lies between the reserve and the end stays for catalog and seal
        assert "No space left" not in daemon.output()

        (disk / "ballast").unlink()
        numbers = itertools.count(600)

        def commits_again() -> bool:
            n = next(numbers)
            rank.ask(f"capture {n} {n + 1}")
            rank.ask("flush 30")
            return bool(rank.ask("counters")["committed"] > first["committed"])

        real.until(commits_again)
        last = rank.ask("counters")
        rank.leave()
        assert "Traceback" not in daemon.stop()
        run = disk / "store" / "run.zarr"
        assert len(checking.captured_numbers(run, 0)) == last["committed"]
        assert not list((run / ".capd").glob("node=*/spool/*"))
        assert sealed_records(run) == last["committed"]
    finally:
        rank.kill()
        daemon.discard()


@pytest.mark.slow
def test_new_series_stop_before_the_inodes_are_used_up_and_all_are_sealed(
    tmpfs: Mount, serve: Callable[..., DaemonProcess], rank: Rank
) -> None:
    disk = tmpfs("size=64m,nr_inodes=2500")
    for number in range(600):
        (disk / f"ballast{number}").touch()
    daemon = serve(disk / "store", "--max-disk", "1GB")
    rank.connect()
    held: dict[int, bytes] = {}
    for number in range(1, 301):
        rank.send(
            Define(id=number, key=Key(quant_type="bf16", rank=0, tensor_name=f"t{number}"), dtype="bfloat16")
        )

    def offer(first: int) -> int:
        """One record of each of the 300 series; how many were taken."""
        before = len(held)
        for number in range(1, 301):
            data = RNG.bytes(64)
            if send(rank, first + number, data, key_id=number):
                held[first + number] = data
        return len(held) - before

    taken = offer(0)
    assert 20 < taken < 300
    assert any("inodes free" in message and "delete files" in message for _, message in rank.nacked.values())
    assert os.statvfs(disk).f_favail > 512

    for number in range(600):
        (disk / f"ballast{number}").unlink()
    rounds = itertools.count(1000, 1000)
    wait_for(lambda: offer(next(rounds)) > taken, "more series are taken")

    rank.bye()
    assert daemon.stop() == 0, daemon.text()
    assert "Traceback" not in daemon.text()
    assert "No space left" not in daemon.text()
    run = disk / "store" / "run.zarr"
    assert not list(run.glob(".capd/node=n/spool/*"))
    assert_reads(run, held)
    assert sum(zarr.open_array(path, mode="r").shape[0] for path in run.glob("bf16/*/*/*/*/data")) == len(
        held
    )


def test_max_disk_bounds_what_the_daemon_adds_logs_and_catalog_included(
    tmp_path: Path, serve: Callable[..., DaemonProcess], rank: Rank
) -> None:
    store = tmp_path / "store"
    daemon = serve(store, "--max-disk", "6MB", "--keep-free", "0")
    rank.connect()
    held: dict[int, bytes] = {}
    sequences = itertools.count(1)
    refused_at = 0.0
    while not refused_at or time.monotonic() < refused_at + 1.5:  # through the next look at the files
        sequence, data = next(sequences), RNG.bytes(SMALL_NBYTES)
        if send(rank, sequence, data):
            held[sequence] = data
        else:
            refused_at = refused_at or time.monotonic()
    assert any("--max-disk" in message for _, message in rank.nacked.values())
    assert file_nbytes(store) < 7_000_000
    assert sum(map(len, held.values())) > 2_000_000
    rank.bye()
    assert daemon.stop() == 0, daemon.text()
    assert_reads(store / "run.zarr", held)


def test_a_restarted_daemon_counts_max_disk_anew(
    tmp_path: Path, serve: Callable[..., DaemonProcess], rank: Rank
) -> None:
    store = tmp_path / "store"
    held: dict[int, bytes] = {}
    sequences = itertools.count(1)
    for total in (3, 6):  # of records that were taken
        daemon = serve(store, "--max-disk", "3.3MB", "--keep-free", "0")
        rank.connect()
        while True:
            sequence, data = next(sequences), RNG.bytes(LARGE_NBYTES)
            if not send(rank, sequence, data):
                break
            held[sequence] = data
        assert len(held) == total
        rank.disconnect()
        daemon.process.kill()
        daemon.process.wait()
    assert_reads(store / "run.zarr", held)
