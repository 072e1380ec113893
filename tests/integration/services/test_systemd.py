"""A daemon below a service manager: its notifications, its watchdog, its passed socket, its units."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.daemon import DaemonProcess, daemons, wait_for
from tests.kit.daemon import Rank as PlainRank
from tests.kit.paths import REPOSITORY
from tests.kit.processes import Daemon, Rank, capd
from tests.kit.tiers import rows

UNITS = REPOSITORY / "deploy" / "systemd"
# MemoryDenyWriteExecute= of a unit, for the command that follows: PR_SET_MDWE, which newer systemd uses, too.
NO_WRITABLE_CODE = """
import ctypes, os, sys
assert ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0
os.execvp(sys.argv[1], sys.argv[1:])
"""
CODECS = ["auto", "default", "fast", "none", "zstd:22", "blosc:lz4:9:noshuffle", "blosc:zstd:9:bitshuffle"]
# Until the file is there, the socket has no daemon. Then there is one, until it is asked to stop; then the next.
KEEP = """
for number in 1 2; do
    until [ -e "$GO$number" ]; do sleep 0.01; done
    bash -c 'export LISTEN_PID=$$; echo $$ > "$0"; exec "$@"' "$PID" "$@"
done
"""


@contextlib.contextmanager
def notify_socket(path: Path) -> Iterator[socket.socket]:
    """The end of NOTIFY_SOCKET that systemd has."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(path))
        made.settimeout(30)
        yield made


def heard(manager: socket.socket, last: str) -> list[str]:
    """The messages up to one that begins with `last`."""
    found: list[str] = []
    while not found or not found[-1].startswith(last):
        found.append(manager.recv(4096).decode())
    return found


@pytest.mark.slow  # the status comes every 5 s
def test_the_manager_hears_of_the_whole_life_and_the_watchdog_of_the_append_threads_hang(
    tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(runtime_dir / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "400000")
    monkeypatch.setenv("CAPD_FAILPOINTS", "log.before_write=hang")
    monkeypatch.setenv("CAPD_SHUTDOWN_TIMEOUT_S", "1")
    with notify_socket(runtime_dir / "notify") as manager, daemons() as made:
        made.append(DaemonProcess(tmp_path / "store", runtime_dir / "s.sock", wait=False))
        assert heard(manager, "READY=1") == ["READY=1"]
        assert "WATCHDOG=1" in heard(manager, "WATCHDOG=1")
        heard(manager, "STATUS=runs: 0, ranks: 0, dropped: 0")
        assert "WATCHDOG=1" in heard(manager, "STATUS=")

        rank = PlainRank(runtime_dir / "s.sock")
        rank.connect()
        rank.put(1)
        # The clock goes on and reports, but nothing feeds the watchdog.
        status = "STATUS=runs: 1, ranks: 1, dropped: 0"
        wait_for(lambda: heard(manager, status) == [status], "a status without a watchdog before it")

        made[0].process.send_signal(signal.SIGTERM)
        assert heard(manager, "STOPPING=1")[-1] == "STOPPING=1"
        assert made[0].process.wait(30) != 0
        rank.close()


def test_a_stop_in_order_is_announced_and_asks_for_time(
    tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(runtime_dir / "notify"))
    with notify_socket(runtime_dir / "notify") as manager, daemons() as made:
        made.append(DaemonProcess(tmp_path / "store", runtime_dir / "s.sock"))
        assert made[0].stop() == 0
        assert [one for one in heard(manager, "EXTEND_TIMEOUT_USEC=") if not one.startswith("STATUS=")] == [
            "READY=1", "STOPPING=1", "EXTEND_TIMEOUT_USEC=15000000\nWATCHDOG=1",
        ]  # fmt: skip


class Activated:
    """systemd-socket-activate and what it starts: a keeper of the socket, below it one daemon after the other."""

    def __init__(self, store: Path, directory: Path) -> None:
        self.path, self._directory = directory / "capd.sock", directory
        self.log = directory / "log"
        serve = [sys.executable, "-m", "capd", "serve", "--store", str(store), "--node", "n"]
        environment = {"GO": str(directory / "go"), "PID": str(directory / "pid")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["systemd-socket-activate", "-l", str(self.path), "--fdname=ranks",
                 *(f"-E{name}={value}" for name, value in environment.items()), "-EPATH", "-EPYTHONPATH",
                 "bash", "-c", KEEP, "keeper", *serve],
                stderr=log, stdout=log, start_new_session=True,
            )  # fmt: skip
        wait_for(self.path.is_socket, "the socket")

    def let(self, number: int) -> None:
        """Let the daemon with this number start, as soon as somebody has connected and the one before is gone."""
        Path(f"{self._directory}/go{number}").touch()

    @property
    def listening(self) -> int:
        """How often a daemon has listened."""
        return self.log.read_text().count("listening on")

    def stop_daemon(self) -> None:
        """SIGTERM to the running daemon; it must end in order, and leave the socket."""
        pid = int((self._directory / "pid").read_text())
        os.kill(pid, signal.SIGTERM)
        stopped = self.log.read_text().count("stopped after")
        wait_for(lambda: self.log.read_text().count("stopped after") > stopped or not _lives(pid), "its end")
        wait_for(lambda: not _lives(pid), "the end of its process")
        assert self.path.is_socket()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def activated(tmp_path: Path, runtime_dir: Path) -> Iterator[Activated]:
    if shutil.which("systemd-socket-activate") is None:
        pytest.skip("systemd-socket-activate is missing: apt-get install systemd")
    made = Activated(tmp_path / "store", runtime_dir)
    yield made
    made.close()


def test_ranks_that_connect_during_a_restart_wait_and_lose_nothing(
    activated: Activated, tmp_path: Path
) -> None:
    words = [tmp_path / "first", tmp_path / "second"]
    ranks: list[Rank] = []

    def start(number: int) -> None:
        with words[number].open("wb") as stderr:
            ranks.append(Rank(f"unix:{activated.path}", number, stderr=stderr))

    try:
        start(0)
        ranks[0].ask("capture 0 20")
        activated.let(1)
        assert ranks[0].ask("flush 60")
        activated.stop_daemon()

        # Nobody listens now. One rank comes back, one is new; both get through to connect.
        start(1)
        for rank in ranks:
            rank.ask("capture 20 40")
        activated.let(2)
        for rank, offered in zip(ranks, (40, 20), strict=True):
            assert rank.ask("flush 60")
            counters = rank.ask("counters")
            assert (counters["offered"], counters["committed"], counters["dropped"]) == (offered, offered, {})
            rank.leave()
    finally:
        for rank in ranks:
            rank.kill()

    assert activated.listening == 2
    # No connection failed, neither for want of a socket nor of a listener.
    assert not any(re.search("Connection refused|No such file", path.read_text()) for path in words)
    activated.stop_daemon()
    assert capd("verify", str(tmp_path / "store" / "run.zarr")).returncode == 0


def test_detach_does_not_lose_the_passed_socket(tmp_path: Path, runtime_dir: Path) -> None:
    serve = f"exec {sys.executable} -m capd serve --store {tmp_path / 'store'} --detach"
    done = subprocess.run(
        ["bash", "-c", f"export LISTEN_PID=$$ LISTEN_FDS=1; {serve}"], capture_output=True, text=True, timeout=60
    )  # fmt: skip

    assert done.returncode == 2
    assert "--detach cannot keep the socket of a service manager" in done.stderr


@pytest.mark.skipif(
    shutil.which("unshare") is None or os.geteuid() != 0, reason="a read-only mount needs root"
)
def test_a_unit_without_its_directory_says_what_to_write_into_it(tmp_path: Path, runtime_dir: Path) -> None:
    """As under ProtectSystem=strict, where everything but the unit's own directories is read-only."""
    serve = f"exec {sys.executable} -m capd serve --store {tmp_path}/ro/captures --endpoint unix:{runtime_dir}/s.sock"
    mount = f"mkdir {tmp_path}/ro; mount -t tmpfs -o ro none {tmp_path}/ro; export INVOCATION_ID=1; {serve}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    [line] = done.stderr.strip().splitlines()
    assert "Read-only file system" in line
    assert f"ReadWritePaths={tmp_path}/ro/captures" in line


# The units


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with a program that exists."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing: apt-get install systemd")
    made = tmp_path / "units"
    shutil.copytree(UNITS, made)
    for unit in made.rglob("*.service"):
        unit.write_text(unit.read_text().replace("/opt/capd/bin/capd", sys.executable))
    return made


@pytest.mark.parametrize("place", ["", "user"])
def test_the_units_are_as_systemd_wants_them(place: str, units: Path) -> None:
    scope = ["--user"] if place else []
    files = [str(units / place / f"capd.{kind}") for kind in ("service", "socket")]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *scope, *files], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    assert str(units) not in done.stderr


def test_the_unit_of_the_node_exposes_little(units: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=15", "--no-pager"]
    done = subprocess.run(
        [*command, str(units / "capd.service")], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stdout
    exposure = re.search(r"exposure level for capd.service: ([\d.]+)", done.stdout)
    assert exposure is not None
    assert float(exposure[1]) <= 1.5


def _knows_mdwe() -> bool:
    done = subprocess.run([sys.executable, "-c", NO_WRITABLE_CODE, "true"], capture_output=True)
    return done.returncode == 0


@pytest.mark.skipif(not _knows_mdwe(), reason="PR_SET_MDWE needs Linux 6.3")
@pytest.mark.parametrize("codec", rows(CODECS, quick=["auto"]))
def test_the_daemon_needs_no_memory_that_is_writable_and_executable(
    codec: str, tmp_path: Path, runtime_dir: Path
) -> None:
    assert "MemoryDenyWriteExecute=yes" in (UNITS / "capd.service").read_text().splitlines()
    prefix = (sys.executable, "-c", NO_WRITABLE_CODE)
    daemon = Daemon(
        tmp_path / "store", runtime_dir, "--codec", codec, "--metrics", f"unix:{runtime_dir}/m", prefix=prefix
    ).start()
    try:
        assert daemon.process is not None
        # It is in force: the kernel refuses what the daemon never asks for.
        refused = "import mmap; mmap.mmap(-1, 4096, prot=7)"
        assert subprocess.run([*prefix, sys.executable, "-c", refused], capture_output=True).returncode == 1
        rank = Rank(daemon.endpoint)
        rank.ask("capture 0 60")
        assert rank.ask("flush 60")
        rank.leave()
        assert "rror" not in daemon.stop()
    finally:
        daemon.discard()
    assert capd("verify", str(tmp_path / "store" / "run.zarr")).returncode == 0


def _system_calls(names: list[str], groups: dict[str, list[str]]) -> set[str]:
    found: set[str] = set()
    for name in names:
        found |= _system_calls(groups[name], groups) if name.startswith("@") else {name}
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is missing")
def test_the_units_filter_lets_every_system_call_of_the_daemon_pass(
    units: Path, tmp_path: Path, runtime_dir: Path
) -> None:
    """Those of @resources fail: the unit sets priority and limits itself, and the daemon goes on without."""
    command = ["systemd-analyze", "syscall-filter", "--no-pager"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    groups: dict[str, list[str]] = {}
    for line in shown.stdout.splitlines():
        if line.startswith("@"):
            group = groups.setdefault(line.split()[0], [])
        elif line.startswith(" ") and not line.strip().startswith("#"):
            group.append(line.strip())
    refused = _system_calls(["@resources"], groups)
    allowed = _system_calls(["@system-service"], groups) - _system_calls(["@privileged"], groups)
    # SQLite calls it as root alone, which the unit's user is not.
    allowed |= {"fchown"} if os.geteuid() == 0 else set()
    refusals = ",".join(f"?{name}" for name in sorted(refused))

    trace = tmp_path / "trace"
    serve = [sys.executable, "-m", "capd", "serve", "--store", str(tmp_path / "store"), "--endpoint"]
    with (tmp_path / "log").open("wb") as log:
        daemon = subprocess.Popen(
            ["strace", "-f", "-c", "-U", "name", "-o", str(trace), f"--inject={refusals}:error=EPERM",
             *serve, f"unix:{runtime_dir}/s.sock"],
            stderr=log,
        )  # fmt: skip
    try:
        wait_for(lambda: "listening on" in (tmp_path / "log").read_text(), "the daemon", 60)
        rank = Rank(f"unix:{runtime_dir}/s.sock")
        rank.ask("capture 0 40")
        assert rank.ask("flush 60")
        rank.leave()
        capd("ctl", "shutdown", "--endpoint", f"unix:{runtime_dir}/s.sock")
    finally:
        code = daemon.wait(60)
    assert code == 0, (tmp_path / "log").read_text()
    called = {line.strip() for line in trace.read_text().splitlines()[1:] if line.strip().isidentifier()}
    assert called > {"memfd_create", "setpriority"}
    assert called - allowed - refused - {"total"} == set()
