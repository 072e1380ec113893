"""The sockets of a service manager: taken by name, and refused with one line that says what to change."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from capd.errors import EndpointError
from capd.server.service.sockets import inherited_sockets, ranks_socket

# Passes its socket on as a service manager does: as descriptor 3, to the process that it becomes.
TAKE = """
import os, sys
from capd.server.service.sockets import inherited_sockets
os.environ["LISTEN_PID"] = str(os.getpid())
found = inherited_sockets()
print({name: one.getsockname() for name, one in found.items()}, "LISTEN_FDS" in os.environ, os.get_inheritable(3))
"""


def listening(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made


def taken(sockets: list[socket.socket], **variables: str) -> subprocess.CompletedProcess[str]:
    """What a process finds that gets these sockets as 3, 4, …"""
    # Above 3, 4, …, so that no move overwrites one that is still to be moved.
    high = [fcntl.fcntl(one.fileno(), fcntl.F_DUPFD, 100) for one in sockets]
    moves = "; ".join(f"os.dup2({passed}, {fd})" for fd, passed in enumerate(high, 3))
    try:
        return subprocess.run(
            [sys.executable, "-c", f"import os; {moves}\n{TAKE}"],
            pass_fds=high, capture_output=True, text=True, timeout=60,
            env={**os.environ, "LISTEN_FDS": str(len(sockets)), **variables},
        )  # fmt: skip
    finally:
        for fd in high:
            os.close(fd)


def test_sockets_come_by_name_and_reach_no_child(runtime_dir: Path) -> None:
    with listening(runtime_dir / "r") as ranks, listening(runtime_dir / "m") as metrics:
        done = taken([metrics, ranks], LISTEN_FDNAMES="metrics:ranks")

    expected = {"metrics": str(runtime_dir / "m"), "ranks": str(runtime_dir / "r")}
    assert done.stdout.strip() == f"{expected} False False", done.stderr


@pytest.mark.parametrize("names", ["", "unknown", "capd.socket", "ranks"])
def test_a_single_socket_without_a_name_is_for_ranks(names: str, runtime_dir: Path) -> None:
    with listening(runtime_dir / "r") as ranks:
        done = taken([ranks], LISTEN_FDNAMES=names)

    assert done.stdout.startswith("{'ranks': "), done.stderr


@pytest.mark.parametrize(
    ("names", "words"),
    [("ranks:ranks", "two sockets with the name ranks"), ("ranks:other", "FileDescriptorName=ranks")],
)
def test_a_name_that_is_not_clear_is_refused(names: str, words: str, runtime_dir: Path) -> None:
    with listening(runtime_dir / "r") as one, listening(runtime_dir / "s") as other:
        done = taken([one, other], LISTEN_FDNAMES=names)

    assert done.returncode != 0
    assert words in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "variables",
    [{}, {"LISTEN_FDS": "0"}, {"LISTEN_PID": "1", "LISTEN_FDS": "1"}, {"LISTEN_PID": ""}],
    ids=["no number", "none", "another process's", "nobody's"],
)
def test_what_is_not_meant_for_this_process_is_not_taken(variables: dict[str, str]) -> None:
    environ = {"LISTEN_PID": str(os.getpid()), **variables}

    assert inherited_sockets(environ) == {}
    assert environ == {}


@pytest.mark.parametrize("count", ["-1", "1000", "9" * 5000, "²", "1 "])
def test_a_number_of_sockets_that_is_none_is_refused(count: str) -> None:
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": count}

    with pytest.raises(EndpointError, match="leave the others out") as refused:
        inherited_sockets(environ)
    assert len(str(refused.value)) < 200
    assert environ == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_directory_that_is_closed_to_the_daemon_is_refused(runtime_dir: Path) -> None:
    with listening(runtime_dir / "r") as passed:
        os.seteuid(1001)
        try:
            with pytest.raises(EndpointError, match="DirectoryMode=0755"):
                ranks_socket(passed, None)
        finally:
            os.seteuid(0)


def test_the_path_stays_when_the_daemon_closes_it(runtime_dir: Path) -> None:
    path = runtime_dir / "r"
    bound = ranks_socket(listening(path), None)

    assert bound.endpoint == f"unix:{path}"
    bound.close()
    assert path.is_socket()


def test_a_socket_that_no_rank_can_find_is_refused(runtime_dir: Path) -> None:
    path = runtime_dir / "r"
    with listening(path) as passed:
        path.unlink()
        with pytest.raises(EndpointError, match=r"systemctl restart capd\.socket"):
            ranks_socket(passed, None)


def test_another_endpoint_than_the_passed_one_is_refused(runtime_dir: Path) -> None:
    with (
        listening(runtime_dir / "r") as passed,
        pytest.raises(EndpointError, match=r"leave --endpoint and CAPD_ENDPOINT out"),
    ):
        ranks_socket(passed, runtime_dir / "other")


def test_a_socket_of_another_kind_is_refused(runtime_dir: Path) -> None:
    with socket.socket(socket.AF_INET) as tcp, pytest.raises(EndpointError, match="ListenStream="):
        ranks_socket(tcp, None)
    with socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0capd-test-{os.getpid()}")
        abstract.listen()
        with pytest.raises(EndpointError, match="without a path"):
            ranks_socket(abstract, None)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(runtime_dir / "silent"))
        with pytest.raises(EndpointError, match="does not listen"):
            ranks_socket(silent, None)
