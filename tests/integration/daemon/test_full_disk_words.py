"""What a full disk says: what is full, how full, who refused (max_disk, keep_free, the disk), and what to do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from capd.store.read.store import open_store
from capd_client.protocol.counter_page import PAGE_NBYTES, DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define, Descriptor, Put
from tests.fault.kit.file_systems import mounted_tmpfs
from tests.kit import forking
from tests.kit.daemon import DaemonProcess, Rank, daemons, wait_for
from tests.kit.store.cli import StoreWriter, linear_key
from tests.kit.store.pt_files import SEED_NAME, seed_dictionary
from tests.kit.tiers import rows

RECORD_NBYTES = 512 << 10
MANY = 200
JOB = """
import torch, capd_client
for step in range(40):
    capd_client.capture(torch.randn(1 << 17), tensor_name="x", iteration=step)
"""

Serve = Callable[..., DaemonProcess]


@pytest.fixture
def serve(runtime_dir: Path) -> Iterator[Serve]:
    with daemons() as made:

        def start(store: Path, *options: str) -> DaemonProcess:
            made.append(DaemonProcess(store, runtime_dir / "s.sock", *options))
            return made[-1]

        yield start


@pytest.fixture
def disk(runtime_dir: Path, serve: Serve) -> Iterator[Path]:
    """A file system of 12 MB; daemons on it end before it does. Skips where mounting is not permitted."""
    with mounted_tmpfs(runtime_dir / "disk", "size=12m,mode=700") as directory:
        yield directory


@pytest.fixture
def rank(runtime_dir: Path) -> Iterator[Rank]:
    made = Rank(runtime_dir / "s.sock")
    yield made
    made.close()


def refused(rank: Rank, nbytes: int = RECORD_NBYTES) -> str:
    """Offer records of one series until one is refused as disk_full; what the rank is told."""
    rank.connect()
    for n in range(1, MANY):
        # Each record is another one: a record that equals the one before it takes no room.
        rank.memory[PAGE_NBYTES : PAGE_NBYTES + nbytes] = os.urandom(nbytes)
        rank.send(Put([Descriptor(n, PAGE_NBYTES, nbytes, 0, (nbytes // 2,), Moment(iteration=n))]))
        rank.listen_until(lambda n=n: n in rank.acked or n in rank.nacked, f"outcome of {n}")  # type: ignore[misc]
        if n in rank.nacked:
            reason, text = rank.nacked[n]
            assert reason is DropReason.DISK_FULL
            rank.count(offered=n)
            return text
    raise AssertionError("nothing was refused")


def figures(text: str) -> list[float]:
    """The megabytes in a text."""
    return [float(number) for number in re.findall(r"([\d.]+) MB", text)]


def filled(disk: Path, left: int) -> None:
    """Fill the disk up to `left` bytes, whatever the daemon writes in the meantime."""
    with (disk / "ballast").open("ab", buffering=0) as ballast:
        while (missing := free_nbytes(disk) - left) > 0:
            with contextlib.suppress(OSError):  # the daemon was faster
                ballast.write(bytes(missing))


def free_nbytes(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def test_max_disk_names_itself_the_file_system_and_how_full_both_are(
    disk: Path, serve: Serve, rank: Rank
) -> None:
    daemon = serve(disk / "store", "--max-disk", "2MB", "--keep-free", "0")
    text = refused(rank)
    assert text.startswith("max_disk refuses a record of 0.5 MB: ")
    assert re.search(
        r": [\d.]+ MB of the 2\.0 MB that this daemon may add are stored or being written, ", text
    )
    _, used, limit, free, total = figures(text)
    assert 0.5 <= used <= limit
    assert used + free < total + 0.5
    assert f"of 12.6 MB are free on the file system {disk} of the store {disk / 'store'}" in text
    assert text.endswith("raise CAPD_MAX_DISK (--max-disk)")
    rank.bye()
    assert daemon.run_stats("run")["why_full"] == text


def test_a_limit_that_nobody_set_is_told_as_such(disk: Path, serve: Serve, rank: Rank) -> None:
    serve(disk / "store")
    text = refused(rank)
    assert text.startswith("max_disk refuses a record of 0.5 MB: ")
    assert "6.3 MB that this daemon may add by default are stored or being written, " in text


def test_keep_free_names_what_is_kept(disk: Path, serve: Serve, rank: Rank) -> None:
    serve(disk / "store", "--max-disk", "1GB", "--keep-free", "75%")
    text = refused(rank)
    assert text.startswith("keep_free refuses a record of 0.5 MB: ")
    assert (
        f"of 12.6 MB are free on the file system {disk} of the store {disk / 'store'}, 9.4 MB stay free"
        in text
    )
    assert text.endswith("make room there, or lower CAPD_KEEP_FREE (--keep-free)")
    record, free, total, kept = figures(text)
    assert (total, kept) == (12.6, 9.4)
    assert kept < free < kept + record + 0.3  # rounded, and documents beside the records


def test_the_disk_itself_is_named_where_no_limit_of_capd_refused(
    disk: Path, serve: Serve, rank: Rank
) -> None:
    serve(disk / "store", "--max-disk", "1GB", "--keep-free", "0")
    text = refused(rank)
    assert text.startswith("the full disk refuses a record")
    assert f"the file system {disk} " in text
    assert "of 12.6 MB are free" in text
    assert "make room there" in text
    assert "keep_free" not in text
    assert "max_disk" not in text


def test_a_write_that_the_disk_refuses_says_so_too(disk: Path, serve: Serve, rank: Rank) -> None:
    """Somebody else filled it since the daemon looked."""
    serve(disk / "store", "--max-disk", "1GB", "--keep-free", "0")
    rank.connect()
    rank.put(1)
    rank.expect_acks(1)
    filled(disk, left=0)
    rank.disconnect()
    text = refused(rank, 64 << 10)
    assert text.startswith("the full disk refuses a record")
    assert f"the file system {disk} " in text
    assert "[Errno" not in text


def test_used_up_inodes_are_told_from_used_up_bytes(runtime_dir: Path, serve: Serve, rank: Rank) -> None:
    with mounted_tmpfs(runtime_dir / "disk", "size=64m,nr_inodes=400,mode=700") as disk:
        daemon = serve(disk / "store", "--max-disk", "1GB", "--keep-free", "0")
        rank.connect()
        for n in range(1, MANY):
            key = Key(quant_type="bf16", rank=0, tensor_name=f"t{n}")
            rank.send(Define(id=n, key=key, dtype="bfloat16"))
            rank.put(n, key_id=n)
        rank.listen_until(lambda: len(rank.acked) + len(rank.nacked) == MANY - 1, "every outcome")
        texts = {text for _, text in rank.nacked.values()}
        assert texts
        for text in texts:
            assert text.startswith("the full disk refuses")
            assert f"the file system {disk} " in text
            assert re.search(r"\d+ inodes free of 400 |inodes left .* \(\d+ of 400 are free", text), text
            assert "delete files" in text
        assert daemon.stop() in (0, 8)


def test_a_rank_whose_run_cannot_be_made_is_told_what_is_full(disk: Path, serve: Serve, rank: Rank) -> None:
    serve(disk / "store", "--max-disk", "1GB", "--keep-free", "0")
    filled(disk, left=0)
    answer = rank.open()
    message = getattr(answer, "message", "")
    assert f"the file system {disk} has no room left for" in message, answer
    assert "of 12.6 MB are free" in message
    assert getattr(answer, "retry", False)


def test_a_daemon_that_finds_no_room_for_its_lock_exits_with_6(disk: Path) -> None:
    (disk / "store").mkdir()
    filled(disk, left=0)
    command = [sys.executable, "-m", "capd", "serve", "--store", str(disk / "store")]
    done = forking.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 6, done.stderr
    assert f"the file system {disk} has no room left" in done.stderr


def test_the_summary_of_capd_run_says_which_limit_refused(disk: Path, runtime_dir: Path) -> None:
    environ = {**os.environ, "CAPD_MAX_DISK": "3MB", "CAPD_KEEP_FREE": "0"}
    command = [
        sys.executable,
        "-m",
        "capd",
        "run",
        "--store",
        str(disk / "store"),
        "--",
        sys.executable,
        "-c",
        JOB,
    ]
    done = forking.run(
        command, env=environ, capture_output=True, text=True, timeout=90, check=False, inner=forking.TORCH
    )
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "were dropped:" in line]
    assert re.search(
        rf"\d+ disk_full \(max_disk refuses a record of 0\.5 MB: .* file system {disk} ", line
    ), line
    assert "raise CAPD_MAX_DISK" in line
    wait_for(lambda: not list(runtime_dir.glob("capd-run-*")), "its daemon is gone")


@pytest.mark.parametrize("to", rows(["pt", "npz"], ["pt"]))
def test_an_export_names_the_file_system_that_is_full(disk: Path, tmp_path: Path, to: str) -> None:
    writer = StoreWriter(tmp_path / "root")
    bits = torch.randn(1024, 512).numpy()
    writer.put("run", linear_key(), bits, "float32", Moment())
    run = writer.close() / "run.zarr"
    filled(disk, left=1 << 20)
    command = [sys.executable, "-m", "capd", "export", str(run), "--to", to, "--out", str(disk / "out")]
    done = forking.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 6, done.stderr
    assert f"the file system {disk} has no room left" in done.stderr
    assert "of 12.6 MB are free" in done.stderr


@pytest.mark.slow
def test_an_import_keeps_what_has_room_says_who_refused_and_goes_on(disk: Path, tmp_path: Path) -> None:
    for number in range(8):
        path = tmp_path / "logs" / "mxfp8" / SEED_NAME.replace("0001", f"{number:04d}")
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(seed_dictionary(torch.randn(1024, 512)), path)
    command = [sys.executable, "-m", "capd", "import", str(tmp_path / "logs"), "--keep-free", "0", "--json"]
    command += ["--store", str(disk / "store")]
    done = forking.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 6, done.stderr
    assert (
        "give it again to continue where it stopped: the full disk refuses a record of 2.1 MB: "
        in done.stderr
    )
    assert f"of 12.6 MB are free on the file system {disk} of the store {disk / 'store'}" in done.stderr
    [series] = open_store(disk / "store" / "logs.zarr").series
    kept = len(series)
    assert 3 <= kept < 8
    subprocess.run(["mount", "-o", "remount,size=40m", str(disk)], check=True)
    done = forking.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout)["already"], json.loads(done.stdout)["imported"]) == (kept, 8 - kept)
