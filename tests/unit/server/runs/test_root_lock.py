"""One owner per store root and per socket; directories, modes and stale sockets."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from capd.errors import ConfigError, EndpointError, StoreBusy, StoreError
from capd.server.net import endpoint
from capd.server.runs.root_lock import OwnerNote, RootLock


@pytest.fixture
def short(runtime_dir: Path) -> Path:
    return runtime_dir


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_endpoints_are_unix_paths() -> None:
    assert endpoint.parse("unix:/run/capd.sock") == Path("/run/capd.sock")
    assert endpoint.parse("unix:x.sock") == Path.cwd() / "x.sock"
    for wrong in ("", "unix:", "tcp://localhost:1", "/run/capd.sock", "unix:/a\0b"):
        with pytest.raises(ConfigError, match="unix:"):
            endpoint.parse(wrong)


def test_a_long_path_is_refused_with_limit_and_remedy() -> None:
    fits = "/" + "x" * (endpoint.MAX_PATH_NBYTES - 1)
    assert endpoint.parse(f"unix:{fits}") == Path(fits)
    with pytest.raises(EndpointError, match=r"107.*--endpoint unix:"):
        endpoint.parse(f"unix:{fits}x")


def test_the_default_is_the_runtime_directory_else_the_temporary_one(short: Path) -> None:
    assert endpoint.default_path({"XDG_RUNTIME_DIR": str(short)}) == short / "capd" / "capd.sock"
    for environ in ({}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "/does/not/exist"}):
        assert endpoint.default_path(environ).parent.name == f"capd-{os.getuid()}"


@pytest.mark.usefixtures("no_umask")
def test_socket_and_directory_are_closed_to_others_whatever_the_umask(short: Path) -> None:
    bound = endpoint.bind(short / "a" / "b" / "capd.sock", private=True)

    assert stat.S_IMODE(os.lstat(bound.path).st_mode) == 0o600
    assert stat.S_IMODE(os.lstat(bound.path.parent).st_mode) == 0o700
    assert bound.endpoint == f"unix:{bound.path}"
    bound.close()
    assert not bound.path.exists()


def test_named_users_can_reach_the_socket(short: Path) -> None:
    bound = endpoint.bind(short / "open" / "capd.sock", private=True, others_allowed=True)

    assert stat.S_IMODE(os.lstat(bound.path).st_mode) == 0o666
    assert stat.S_IMODE(os.lstat(bound.path.parent).st_mode) == 0o711
    bound.close()


def test_a_default_directory_that_others_can_enter_is_refused(short: Path) -> None:
    directory = short / "capd"
    directory.mkdir()
    directory.chmod(0o755)
    with pytest.raises(EndpointError, match="0755"):
        endpoint.bind(directory / "capd.sock", private=True)


def test_a_live_socket_is_busy_and_a_stale_one_is_replaced(short: Path) -> None:
    path = short / "capd.sock"
    first = endpoint.bind(path, private=False)
    with pytest.raises(StoreBusy, match="another daemon listens"):
        endpoint.bind(path, private=False)
    first.socket.close()  # as a killed daemon leaves it: the path stays
    assert path.exists()

    second = endpoint.bind(path, private=False)

    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    first.unlink()  # not its own any more
    assert path.exists()
    second.close()
    assert not path.exists()


def test_what_is_not_a_socket_is_never_removed(short: Path) -> None:
    path = short / "capd.sock"
    path.write_text("precious")
    with pytest.raises(EndpointError, match="not a socket"):
        endpoint.bind(path, private=False)
    assert path.read_text() == "precious"


def test_a_second_owner_of_the_root_is_told_the_pid_of_the_first(tmp_path: Path) -> None:
    first = RootLock(tmp_path / "store", "node")
    first.note.endpoint = "unix:/somewhere"
    first.write()
    with pytest.raises(StoreBusy, match=rf"pid {os.getpid()} on unix:/somewhere"):
        RootLock(tmp_path / "store", "node")
    other = RootLock(tmp_path / "store", "other-node")
    other.release()
    first.release()

    assert stat.S_IMODE(os.stat(first.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "store").st_mode) == 0o700
    RootLock(tmp_path / "store", "node").release()


def test_the_note_outlives_a_crash_but_not_an_orderly_end(tmp_path: Path) -> None:
    crashed = RootLock(tmp_path, "node")
    crashed.note.assigned_run = "run-1"
    crashed.write()
    os.close(crashed._fd)  # what a kill does

    second = RootLock(tmp_path, "node")
    assert second.previous.assigned_run == "run-1"
    second.release()

    third = RootLock(tmp_path, "node")
    assert third.previous == OwnerNote()
    third.release()


def test_a_crash_at_any_step_of_writing_leaves_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise InterruptedError

    lock = RootLock(tmp_path, "node")
    lock.note.endpoint = "unix:/a/long/path/to/a.sock"
    lock.write()
    for call, expected in (("pwrite", "unix:/a/long/path/to/a.sock"), ("ftruncate", "unix:/b")):
        lock.note.endpoint = "unix:/b"
        with monkeypatch.context() as patched:
            patched.setattr(os, call, crash)
            with pytest.raises(InterruptedError):
                lock.write()
        with pytest.raises(StoreBusy, match=rf"on {expected}\)"):
            RootLock(tmp_path, "node")
    lock.release()


def test_a_garbled_note_reads_as_empty(tmp_path: Path) -> None:
    (tmp_path / ".capd-node.lock").write_bytes(b'{"pid": "what')

    lock = RootLock(tmp_path, "node")

    assert lock.previous == OwnerNote()
    lock.release()


def test_a_root_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="--store"):
        RootLock(tmp_path / "file" / "store", "node")
    (tmp_path / ".capd-node.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="cannot use store"):
        RootLock(tmp_path, "node")
    assert not (tmp_path / "elsewhere").exists()
