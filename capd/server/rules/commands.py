"""The commands of rules: one process at a time, without a shell, with the alert as JSON on its standard input."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

__all__ = ["AlertCommands"]

logger = logging.getLogger(__name__)

TIMEOUT_S = 30.0
MAX_WAITING = 16
# Of the daemon's environment, which may hold credentials, a command gets these.
_KEPT = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER")


class AlertCommands:
    """Runs the commands in a thread of its own, which begins with the first one.

    Attributes:
        failed: The commands that could not be started, failed, or took too long.
        left_out: The commands that were not run, because too many waited.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Begin without a thread."""
        self._environ = {name: environ[name] for name in _KEPT if name in environ}
        self._waiting: queue.Queue[tuple[Sequence[str], bytes] | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._running: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self.failed = self.left_out = 0

    def run(self, command: Sequence[str], payload: bytes) -> None:
        """Run a command when those before it have ended. Never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="capd-alert-commands", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait((command, payload))
        except queue.Full:
            self.left_out += 1
            if self.left_out == 1:
                logger.warning("[trigger] %d commands wait already; further ones are not run", MAX_WAITING)

    def stop(self, timeout_s: float) -> None:
        """Wait for the commands, at most `timeout_s`, and end the one that still runs."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(timeout_s)
        self._stopping = True
        if self._thread.is_alive():
            _end(self._running)
            self._thread.join(1.0)

    def _loop(self) -> None:
        while not self._stopping and (entry := self._waiting.get()) is not None:
            try:
                self._run(*entry)
            except Exception:
                # This is the outermost loop of the thread.
                self.failed += 1
                logger.exception("[trigger] a command failed")

    def _run(self, command: Sequence[str], payload: bytes) -> None:
        try:
            process = self._running = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=self._environ, close_fds=True, start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            self.failed += 1
            logger.warning("[trigger] cannot run %s: %s", command[0], error)
            return
        try:
            # A command that does not read its input is no failure.
            process.communicate(payload, TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.failed += 1
            logger.warning("[trigger] %s took more than %.0f s and was ended", command[0], TIMEOUT_S)
            _end(process)
            process.wait()
            return
        finally:
            self._running = None
        if process.returncode:
            self.failed += 1
            logger.warning("[trigger] %s failed with exit code %d", command[0], process.returncode)


def _end(process: subprocess.Popen[bytes] | None) -> None:
    """Kill a command and what it started."""
    if process is not None and process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
