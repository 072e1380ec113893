"""The metrics of one daemon: its snapshot, the pages made of it, and the ways in which they are read."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

from capd._version import __version__
from capd.config import DaemonSettings
from capd.errors import ConfigError
from capd.server.limits import DiskBudget
from capd.server.metrics import host, text
from capd.server.metrics.access import Listening, listen
from capd.server.metrics.families import Facts, families
from capd.server.metrics.http_server import HttpServer, Request, Response
from capd.server.metrics.snapshot import Snapshot
from capd.server.metrics.textfile import TextFile
from capd.store.format.frames import FORMAT_VERSION

__all__ = ["Metrics"]

logger = logging.getLogger(__name__)

# A page lives as long, and so does a snapshot.
INTERVAL_S = 1.0
# An older snapshot means that the daemon's clock stands still.
_STALLED_S = 30.0


class _Page(NamedTuple):
    made: float
    snapshot: Snapshot
    body: bytes


class Metrics:
    """The metrics of a daemon. `tick` belongs to the daemon's clock; everything else happens in own threads.

    Without `--metrics` and `--metrics-file` there is no thread, and no snapshot is taken.
    """

    def __init__(self, settings: DaemonSettings, listening: Listening | None = None) -> None:
        """Open the sockets and claim the file. Nothing is answered before `start`.

        Args:
            settings: The settings of the daemon.
            listening: A socket that listens already, in place of that of the settings.

        Raises:
            ConfigError: The settings are not safe, such as an open host without a token, or they name another address
                than `listening`.
            EndpointError: The address or the directory of the file cannot be used.
            StoreBusy: Another program has the socket or the file.
        """
        self._settings = settings
        self._listening = listening
        self._file: TextFile | None = None
        self._server: HttpServer | None = None
        if listening is not None and settings.metrics not in ("off", listening.address):
            raise ConfigError(
                f"the service manager passed {listening.address} for metrics, but {settings.metrics} is configured; "
                f"leave --metrics and CAPD_METRICS out, or stop the .socket unit of the metrics"
            )
        if listening is None and settings.metrics != "off":
            self._listening = listen(settings.metrics, settings.metrics_token_file)
        try:
            self._file = None if settings.metrics_file is None else TextFile(settings.metrics_file)
        except BaseException:
            self.close()
            raise
        if self._listening is not None:
            # The port may have been chosen by the kernel.
            logger.info("metrics on %s", self._listening.address)
        self._started = time.monotonic()
        self._pages: dict[tuple[bool, bool], _Page] = {}
        self._encode_cpu_s = 0.0
        self._stopping, self._failed = False, False

    @property
    def is_on(self) -> bool:
        """Whether anybody can read metrics."""
        return self._listening is not None or self._file is not None

    def start(self, take: Callable[[], Snapshot], budget: DiskBudget, node: str, threads: int) -> None:
        """Take the first snapshot and begin to serve.

        Args:
            take: Returns a new snapshot.
            budget: The disk budget of the daemon.
            node: The name of the node.
            threads: The encode threads of the daemon.
        """
        if not self.is_on:
            return
        self._take, self._budget, self._node, self._threads = take, budget, node, threads
        self._snapshot: Snapshot = take()
        self._tried = time.monotonic()
        if self._listening is not None:
            self._server = HttpServer(self._listening.socket, self.answer, name="capd-metrics")
            self._server.start()
        if self._file is not None:
            self._file.start(self._file_page)

    def tick(self) -> None:
        """Take a new snapshot if the last one is old. Call it from the daemon's clock."""
        if self.is_on and time.monotonic() - self._tried >= INTERVAL_S:
            self._renew()

    def stop_clock(self) -> None:
        """Take a last snapshot. From now on an old snapshot is in order, because the daemon is stopping."""
        if self.is_on:
            self._stopping = True
            self._renew()

    def _renew(self) -> None:
        self._tried = time.monotonic()
        try:
            self._snapshot = self._take()
            self._failed = False
        except Exception:
            # A disk that fails must neither fill the log nor keep the daemon from sealing.
            if not self._failed:
                self._failed = True
                logger.exception("the metrics stand still; further failures are not logged")

    def close(self) -> None:
        """End the threads, close the sockets and remove the file."""
        if self._server is not None:
            self._server.stop()
        if self._file is not None:
            self._file.close()
        if self._listening is not None:
            self._listening.close()

    def unlink(self) -> None:
        """Remove the path of the socket and the file, for a process that ends at once."""
        if self._listening is not None and self._listening.bound is not None:
            self._listening.bound.unlink()
        if self._file is not None:
            self._file.unlink()

    # In the thread of the server

    def answer(self, request: Request) -> Response:
        """Answer a request. Takes no lock."""
        assert self._listening is not None  # noqa: S101 - a server runs
        access = self._listening.access
        if not access.knows_host(request.headers):
            return Response.of(HTTPStatus.FORBIDDEN, "this host name is not served; use 127.0.0.1")
        if request.path not in ("/metrics", "/healthz"):
            return Response.of(HTTPStatus.NOT_FOUND, "only /metrics and /healthz are here")
        if request.method not in ("GET", "HEAD"):
            return Response.of(
                HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered", Allow="GET, HEAD"
            )
        if request.path == "/healthz":
            problem = self.problem()
            status = HTTPStatus.OK if problem is None else HTTPStatus.SERVICE_UNAVAILABLE
            return Response.of(status, problem or "ok")
        if not access.knows_token(request.headers):
            return Response.of(
                HTTPStatus.UNAUTHORIZED,
                "send the token: Authorization: Bearer TOKEN",
                **{"WWW-Authenticate": "Bearer"},
            )
        if self.is_stalled:
            # Old figures must not pass for new ones. Prometheus then sees a daemon that is down.
            return Response.of(HTTPStatus.SERVICE_UNAVAILABLE, "stalled")
        openmetrics = wants_openmetrics(request.headers)
        kind = text.OPENMETRICS if openmetrics else text.TEXT
        return Response(HTTPStatus.OK, self.page(openmetrics=openmetrics), kind)

    def problem(self) -> str | None:
        """Return the word of /healthz for a daemon that keeps nothing now; None if all is well."""
        snapshot = self._snapshot
        disk, budget = host.file_system(self._budget.root), self._budget
        if snapshot.store_failed or disk is None:
            return "store_failed"
        used_up = budget.max_disk is not None and snapshot.used_nbytes >= budget.max_disk
        if snapshot.refuses or used_up or disk.free_nbytes <= budget.keep_free_nbytes():
            return "disk_full"
        return "stalled" if self.is_stalled else None

    @property
    def is_stalled(self) -> bool:
        """Whether the daemon's clock stands still, although the daemon is not stopping."""
        return not self._stopping and time.monotonic() - self._snapshot.taken > _STALLED_S

    def page(self, *, openmetrics: bool, with_process: bool = True) -> bytes:
        """Return the page of the newest snapshot. It is made once, however often it is read."""
        snapshot, now = self._snapshot, time.monotonic()
        known = self._pages.get((openmetrics, with_process))
        if known is not None and known.snapshot is snapshot and now - known.made < INTERVAL_S:
            return known.body
        facts = self._facts(snapshot, with_process=with_process)
        body = text.render(families(facts, snapshot), openmetrics=openmetrics)
        self._pages[openmetrics, with_process] = _Page(now, snapshot, body)
        return body

    def _file_page(self) -> bytes:
        if self.is_stalled:
            raise TimeoutError("the daemon's clock stands still")
        return self.page(openmetrics=False, with_process=False)

    def _facts(self, snapshot: Snapshot, *, with_process: bool) -> Facts:
        # A counter never goes down, also when the threads have ended.
        self._encode_cpu_s = max(self._encode_cpu_s, host.threads_cpu_s(snapshot.encoders))
        disk = host.file_system(self._budget.root)
        return Facts(
            version=__version__,
            format=str(FORMAT_VERSION),
            node=self._node,
            uptime_s=time.monotonic() - self._started,
            threads=self._threads,
            slurm_job_id=os.environ.get("SLURM_JOB_ID", ""),
            each_rank=self._settings.metrics_ranks,
            encode_cpu_s=self._encode_cpu_s,
            disk=disk,
            keep_free_nbytes=0 if disk is None else self._budget.keep_free_nbytes(),
            max_disk_nbytes=self._budget.max_disk,
            process=host.process() if with_process else None,
        )


def wants_openmetrics(headers: Mapping[str, str]) -> bool:
    """Return whether the header Accept prefers OpenMetrics 1.0 to the plain text format."""
    openmetrics = plain = anything = 0.0
    for entry in headers.get("accept", "").lower().split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        values = dict(parameter.partition("=")[::2] for parameter in parameters)
        weight = _weight(values.get("q", "1"))
        if kind == "application/openmetrics-text" and values.get("version", "1.0.0").strip('"') == "1.0.0":
            openmetrics = max(openmetrics, weight)
        elif kind == "text/plain":
            plain = max(plain, weight)
        elif kind in ("*/*", "text/*"):
            anything = max(anything, weight)
    return openmetrics > 0 and openmetrics >= (plain or anything)


def _weight(word: str) -> float:
    try:
        return min(1.0, max(0.0, float(word)))
    except ValueError:
        return 0.0
