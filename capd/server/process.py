"""The other processes that the daemon follows, through pidfds if the kernel has them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shlex
import signal
import struct
import time

__all__ = ["RETURN_S", "OtherProcess", "RankProcess", "command_of", "has_ended", "how_ended"]

# A rank that lost its connection tries to connect every 2 s.
RETURN_S = 60.0
_COLLECTED_S = 5.0
# A catalog has one for each rank.
_MAX_COMMAND_CHARS = 1000

# Linux 6.15, include/uapi/linux/pidfd.h: a mask of the fields asked and answered, the process's ids, its wait status.
_PIDFD_INFO = struct.Struct("=Q52xi")
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3


def command_of(pid: int) -> str:
    """Return the command line of a process, at most _MAX_COMMAND_CHARS of it; "" if it cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4 * _MAX_COMMAND_CHARS).rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    # Quoted as for a shell, so that the words stay apart.
    text = shlex.join(word.decode(errors="replace") for word in words if word or len(words) > 1)
    return text if len(text) <= _MAX_COMMAND_CHARS else text[: _MAX_COMMAND_CHARS - 1] + "…"


def has_ended(handle: int) -> bool:
    """Return whether the process of a pidfd is gone."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(0))


def how_ended(handle: int) -> str | None:
    """Return how the process of a pidfd ended: "SIGKILL", "exit code 3".

    Returns:
        None if the parent has not collected the exit code yet. "" if the kernel does not report it (before Linux
            6.15).
    """
    info = bytearray(_PIDFD_INFO.size)
    _PIDFD_INFO.pack_into(info, 0, _PIDFD_INFO_EXIT, 0)
    try:
        fcntl.ioctl(handle, _PIDFD_GET_INFO, info)
    except OSError:
        return ""
    mask, status = _PIDFD_INFO.unpack(info)
    if not mask & _PIDFD_INFO_EXIT:
        return None
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        # A real-time signal has no name.
        return f"signal {-code}"


class OtherProcess:
    """A process that need not be a child. A descriptor follows it and is never closed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._handle: int | None = None
        # Without a pidfd, this one counts as alive if another process gets the number.
        with contextlib.suppress(OSError):
            self._handle = os.pidfd_open(pid)

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        if self._handle is not None:
            return has_ended(self._handle)
        try:
            os.kill(self._pid, 0)
        except OSError as error:
            return isinstance(error, ProcessLookupError)
        return False


class RankProcess:
    """The process of a rank: tells whether a rank without a connection can still come back.

    Not thread-safe: the session of the rank holds a lock.
    """

    def __init__(self) -> None:
        # The time at which its connection was last lost.
        self.lost_at = time.monotonic()
        self._handle: int | None = None

    def follow(self, handle: int | None) -> None:
        """Follow the process of a pidfd, which this object now owns. None: the process is unknown."""
        before, self._handle = self._handle, handle
        if before is not None:
            with contextlib.suppress(OSError):
                os.close(before)

    def lost(self) -> None:
        """Note that its connection is gone."""
        self.lost_at = time.monotonic()

    @property
    def ended(self) -> bool:
        """Whether the process is known to be gone."""
        return self._handle is not None and has_ended(self._handle)

    @property
    def end(self) -> str:
        """How the process ended, in the words of `how_ended`; "" if that is not known."""
        return "" if self._handle is None else how_ended(self._handle) or ""

    @property
    def end_may_follow(self) -> bool:
        """Whether the kernel may soon report how the process ended: a launcher collects exit codes now and then."""
        if self._handle is None or time.monotonic() - self.lost_at > _COLLECTED_S:
            return False
        return how_ended(self._handle) is None

    def is_given_up(self, grace_s: float | None, return_s: float) -> bool:
        """Return whether a rank without a connection counts as gone.

        Args:
            grace_s: Seconds without a connection after which a rank without a handle is given up. None: only the end
                of the process counts.
            return_s: Seconds without a connection after which a process with a handle is given up. If it still lives,
                it has become another program through exec.
        """
        patience_s = grace_s if grace_s is None or self._handle is None else return_s
        waited_s = time.monotonic() - self.lost_at
        return self.ended or (patience_s is not None and waited_s > patience_s)
