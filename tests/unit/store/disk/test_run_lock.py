"""The lock of a run: writers share it, a removal has it alone, and a removed run takes it along."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from capd.errors import StoreBusy
from capd.store.disk import run_lock
from capd.store.disk.run_lock import RunLock, is_written

HOLD = """
import sys
from pathlib import Path
from capd.store.disk.run_lock import RunLock
lock = RunLock.shared(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_writers_share_it_and_keep_a_removal_out(tmp_path: Path) -> None:
    run = tmp_path / "run.zarr"
    assert not is_written(run)
    with RunLock.shared(run), RunLock.shared(run):
        assert is_written(run)
        with pytest.raises(StoreBusy, match="is open"):
            RunLock.alone(run)
    assert not is_written(run)
    assert (run / ".capd" / "lock").stat().st_mode & 0o777 == 0o600


def test_the_end_of_a_process_frees_it_however_it_ends(tmp_path: Path) -> None:
    run = tmp_path / "run.zarr"
    command = [sys.executable, "-c", HOLD, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"held\n"
        assert is_written(run)
        with pytest.raises(StoreBusy):
            RunLock.alone(run)
        writer.kill()
    with RunLock.alone(run):
        assert is_written(run)


def test_a_writer_that_waits_for_a_removal_finds_a_new_run(tmp_path: Path) -> None:
    """It must not hold the lock file that left with the removed run."""
    run = tmp_path / "run.zarr"
    held: list[RunLock] = []
    removal = None
    with RunLock.shared(run):
        pass
    removal = RunLock.alone(run)
    writer = threading.Thread(target=lambda: held.append(RunLock.shared(run)))
    writer.start()
    run.rename(tmp_path / "gone")
    removal.release()
    writer.join(30)

    assert is_written(run)
    assert not is_written(tmp_path / "gone")
    held[0].release()


@pytest.mark.parametrize("is_there", [False, True])
def test_a_run_removed_before_its_lock_file_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """A writer of a new run makes it again. A command on an existing one is told that it is gone."""
    run = tmp_path / "run.zarr"
    run.mkdir()
    opened = run_lock._opened

    def removed_first(run: Path, flags: int) -> int:
        if not (tmp_path / "gone").exists():
            run.rename(tmp_path / "gone")
        return opened(run, flags)

    monkeypatch.setattr(run_lock, "_opened", removed_first)
    if is_there:
        with pytest.raises(FileNotFoundError):
            RunLock.shared(run, is_there=True)
        assert not run.exists()
    else:
        with RunLock.shared(run):
            assert is_written(run)


def test_a_writer_does_not_wait_for_ever(tmp_path: Path) -> None:
    run = tmp_path / "run.zarr"
    run.mkdir()
    with RunLock.alone(run), pytest.raises(StoreBusy, match="is being removed; try again") as refused:
        RunLock.shared(run, patience_s=0.0)
    assert refused.value.retry


def test_a_removal_waits_as_long_as_it_may(tmp_path: Path) -> None:
    run = tmp_path / "run.zarr"
    writer = RunLock.shared(run)
    ending = threading.Timer(0.05, writer.release)
    ending.start()
    with RunLock.alone(run, patience_s=30.0):
        pass
    ending.join()
