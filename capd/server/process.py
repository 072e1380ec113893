"""Other processes, as far as the kernel tells of them: pidfds, where there are any."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import time

__all__ = ["RETURN_S", "OtherProcess", "RankProcess", "has_ended", "how_ended"]

RETURN_S = 60.0  # a rank that lost its connection knocks again every 2 s
_COLLECTED_S = 5.0

# Linux 6.15, include/uapi/linux/pidfd.h: a mask of what is asked and answered, the process's ids, its wait status.
_PIDFD_INFO = struct.Struct("=Q52xi")
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3


def has_ended(handle: int) -> bool:
    """Whether the process behind a pidfd is gone."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(0))


def how_ended(handle: int) -> str | None:
    """How the process of a pidfd ended: "SIGKILL", "exit code 3".

    None: its parent has not collected the exit code. "": the kernel does not tell (before Linux 6.15).
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
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


class OtherProcess:
    """A process that need not be a child, followed from now on by a descriptor that is never closed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._handle: int | None = None
        self._gone = False
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone = True
        except OSError:  # no pidfds here: the number may be another process's later, then this one stays on
            pass

    @property
    def ended(self) -> bool:
        """Whether it is gone."""
        if self._handle is not None:
            return has_ended(self._handle)
        if not self._gone:
            try:
                os.kill(self._pid, 0)
            except ProcessLookupError:
                self._gone = True
            except PermissionError:
                pass
        return self._gone


class RankProcess:
    """Tells whether a rank without a connection can still come back. Not thread-safe: its session holds a lock."""

    def __init__(self) -> None:
        self.lost_at = time.monotonic()  # when its connection was last seen to go
        self._handle: int | None = None

    def follow(self, handle: int | None) -> None:
        """From now on the process behind `handle` (a pidfd, owned from here on; None: unknown)."""
        before, self._handle = self._handle, handle
        if before is not None:
            with contextlib.suppress(OSError):
                os.close(before)

    def lost(self) -> None:
        """Its connection is gone."""
        self.lost_at = time.monotonic()

    @property
    def ended(self) -> bool:
        """Whether the process is known to be gone."""
        return self._handle is not None and has_ended(self._handle)

    @property
    def end(self) -> str:
        """How the process ended, as `how_ended` says it; "" where that is not known."""
        return "" if self._handle is None else how_ended(self._handle) or ""

    @property
    def may_tell(self) -> bool:
        """Whether it may soon be known how the process ended: a launcher collects exit codes now and then."""
        if self._handle is None or time.monotonic() - self.lost_at > _COLLECTED_S:
            return False
        return how_ended(self._handle) is None

    def is_given_up(self, grace_s: float | None, return_s: float) -> bool:
        """Whether a rank without a connection counts as gone.

        A process that lives `return_s` without a connection is no rank any more: after exec it is another program.
        Without a handle a rank is given up after `grace_s`. grace_s None: only the end of the process counts.
        """
        patience_s = grace_s if grace_s is None or self._handle is None else return_s
        waited_s = time.monotonic() - self.lost_at
        return self.ended or (patience_s is not None and waited_s > patience_s)
