"""The process that measures for the daemon: its start, its answers, and its end."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from capd.errors import CapdError
from capd.lab.messages import MAX_ANSWER_NBYTES, MeasuredAnswer, MeasureOrder, decode_answer
from capd.server.lab.copies import CopyMemory

__all__ = ["MeasuringLost", "MeasuringProcess"]

# The import of torch, on a busy node. And one tensor of the largest size.
_START_S = 300.0
_ANSWER_S = 600.0
_LOOK_S = 0.1


class MeasuringLost(CapdError):
    """The process ended, or gives no answer; says how."""


class MeasuringProcess:
    """One `python -m capd.lab.worker`. Used by one thread."""

    def __init__(self, memory: CopyMemory, formats: str) -> None:
        """Start the process.

        Raises:
            OSError: It cannot be started.
        """
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with there:
            words = [str(there.fileno()), str(memory.fd), str(memory.nbytes), formats]
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "capd.lab.worker", *words],
                    pass_fds=(there.fileno(), memory.fd),
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except BaseException:
                here.close()
                raise
        self._connection = Connection(here.detach())
        # What its answers told, and all of its time once it has ended.
        self._told_s, self._used_s = 0.0, 0.0

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def wait_ready(self, is_stopping: Callable[[], bool]) -> float:
        """Wait until it can measure, or `is_stopping`. Return the CPU time of its start. Raises MeasuringLost."""
        answer = self._answer(_START_S, is_stopping)
        if answer.problem:
            raise MeasuringLost(f"it cannot measure: {answer.problem}")
        return answer.cpu_s

    def ask(self, order: MeasureOrder, is_stopping: Callable[[], bool]) -> MeasuredAnswer:
        """Let it measure a tensor, and wait for the answer or `is_stopping`. Raises MeasuringLost."""
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(order))
        except OSError:
            raise MeasuringLost(self._end()) from None
        return self._answer(_ANSWER_S, is_stopping)

    def close(self) -> float:
        """End it at once. Return the CPU time that none of its answers told."""
        self._connection.close()
        # Nothing else reaps it, so that its number is no other process.
        if self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._reap(os.wait4(self._process.pid, 0))
        return max(0.0, self._used_s - self._told_s)

    def _answer(self, timeout_s: float, is_stopping: Callable[[], bool]) -> MeasuredAnswer:
        until = time.monotonic() + timeout_s
        try:
            while not self._connection.poll(_LOOK_S):
                if is_stopping():
                    raise MeasuringLost("the daemon stops")
                if time.monotonic() > until:
                    raise MeasuringLost(f"it gave no answer within {timeout_s:g} s")
            answer = decode_answer(self._connection.recv_bytes(MAX_ANSWER_NBYTES))
            self._told_s += answer.cpu_s
            return answer
        except (EOFError, OSError, msgspec.MsgspecError):
            raise MeasuringLost(self._end()) from None

    def _end(self) -> str:
        until = time.monotonic() + 1.0
        while self._process.returncode is None and time.monotonic() < until:
            if (found := os.wait4(self._process.pid, os.WNOHANG))[0]:
                self._reap(found)
            else:
                time.sleep(0.01)
        code = self._process.returncode
        if code is None:
            return "it closed its socket"
        return f"it ended by signal {-code}" if code < 0 else f"it ended with exit code {code}"

    def _reap(self, found: tuple[int, int, resource.struct_rusage]) -> None:
        """Note the end. `Popen.wait` would not tell the CPU time."""
        _, status, used = found
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self._used_s = used.ru_utime + used.ru_stime


def _environment() -> dict[str, str]:
    """Return the environment of the process: it is captured by nobody, has one thread and no GPU."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CAPD_")}
    return {**kept, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
