"""Tests whom a rank hands its tensors to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from capd_client.transport.link import Link

LISTENER = """
import os, socket, sys
os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
listening.listen()
print("here", flush=True)
listening.accept()
sys.stdin.read()
"""
OTHER = 12345

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to listen as another user")


@contextmanager
def listening(path: Path, uid: int) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER, str(path), str(uid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        os.chown(made, OTHER, OTHER)
        yield Path(made)


@pytest.fixture
def made_by_root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/run", prefix="capd-test-") as made:
        os.chown(made, OTHER, OTHER)
        os.chmod(made, 0o711)  # noqa: S103
        yield Path(made)


def test_a_process_of_another_user_in_tmp_gets_no_tensors(open_to_all: Path) -> None:
    path = open_to_all / "s.sock"
    with listening(path, OTHER), pytest.raises(PermissionError) as refused:
        Link(str(path))
    [line] = str(refused.value).splitlines()
    assert f"it runs as uid {OTHER}, and any user can make a socket below /tmp" in line
    assert "such as in /run/capd" in line


def test_a_link_out_of_a_safe_place_is_followed(open_to_all: Path, made_by_root: Path) -> None:
    path, named = open_to_all / "s.sock", made_by_root / "named.sock"
    named.symlink_to(path)
    with listening(path, OTHER), pytest.raises(PermissionError, match="below /tmp"):
        Link(str(named))


def test_a_daemon_of_another_user_is_trusted_where_only_root_makes_directories(made_by_root: Path) -> None:
    path = made_by_root / "s.sock"
    with listening(path, OTHER):
        Link(str(path)).close()


def test_ones_own_daemon_and_roots_are_trusted_everywhere(open_to_all: Path) -> None:
    path = open_to_all / "s.sock"
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(str(path))
        own.listen()
        Link(str(path)).close()
