"""The lab's share of a CPU: when it may measure, and which calls it measures if it cannot measure all of its sample."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable

__all__ = ["CpuBudget", "FairShare", "MeasuringCost"]

# CPU time that was not used is kept for so long.
_BURST_S = 2.0
# Shorter waits are not worth it.
_LEAST_WAIT_S = 1e-6
# The time over which the wanted CPU time is averaged.
_WINDOW_S = 20.0
# The fixed cost of a record, as the number of bytes that take the same time.
_RECORD_NBYTES = 64 << 10
# Before the first measurement: the time of a byte in one format. Some 150 MB a second on one core.
_FIRST_S_PER_BYTE = 1 / 150e6
# Newer measurements count more: after so many bytes, an old one counts for a third.
_MEMORY_NBYTES = 256 << 20


class CpuBudget:
    """A bucket of CPU seconds that fills at `share` a second. What is spent may exceed it, and is then waited for."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock = share, clock
        self._held = self._most = share * _BURST_S
        self._at = clock()

    def wait_s(self) -> float:
        """Return the seconds until something may be spent; 0 if that is now."""
        self.spend(0.0)
        wait_s = -self._held / self._share
        return wait_s if wait_s > _LEAST_WAIT_S else 0.0

    def wait_full_s(self) -> float:
        """Return the seconds until time that is not spent would be lost; 0 if that is now."""
        self.spend(0.0)
        wait_s = (self._most - self._held) / self._share
        return wait_s if wait_s > _LEAST_WAIT_S else 0.0

    def spend(self, cpu_s: float) -> None:
        """Take CPU time that was used since the last call."""
        now = self._clock()
        # What comes in while a record is measured is not lost to the limit.
        self._held = min(self._most, self._held + (now - self._at) * self._share - cpu_s)
        self._at = now


class MeasuringCost:
    """The CPU time that a record will take, from those before it."""

    def __init__(self, formats: int) -> None:
        self._nbytes: float = 16 << 20
        self._spent_s = self._nbytes * _FIRST_S_PER_BYTE * formats

    def of(self, nbytes: int) -> float:
        """Return the expected seconds for a record of so many bytes."""
        return (nbytes + _RECORD_NBYTES) * self._spent_s / self._nbytes

    def learn(self, nbytes: int, cpu_s: float) -> None:
        """Take the seconds that a record took."""
        added = nbytes + _RECORD_NBYTES
        kept = math.exp(-added / _MEMORY_NBYTES)
        self._nbytes = self._nbytes * kept + added
        self._spent_s = self._spent_s * kept + cpu_s


class FairShare:
    """Chooses among the calls of the sample if measuring all of them would take more than the budget.

    The first calls of a step would otherwise be measured again and again, and the last layers never. A checksum of the
    call decides, so that all tensors of it are measured, or none, and others in the next step.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock = share, clock
        # The CPU seconds per second that the sample would take.
        self._wanted = 0.0
        self._at = clock()

    def admits(self, call: tuple[object, ...], cost_s: float) -> bool:
        """Return whether to measure a tensor of a call, which would take so many CPU seconds."""
        now = self._clock()
        self._wanted = self._wanted * math.exp(-(now - self._at) / _WINDOW_S) + cost_s / _WINDOW_S
        self._at = now
        if self._wanted <= self._share:
            return True
        return zlib.crc32(repr(call).encode()) < self._share / self._wanted * 2**32
