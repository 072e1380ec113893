"""What became of the records of a lab's sample, counted by reason."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

__all__ = ["OUTCOMES", "LabCounters", "LabFigures"]

OUTCOMES = (
    "measured", "budget", "memory", "too_large", "in_parts", "no_elements", "failed", "not_stored", "stopped",
)  # fmt: skip
"""measured: the errors are in the store. The others say why a record of the sample has none.

budget: the CPU share does not allow it. memory: too many copies wait. too_large: a copy would not fit at all. in_parts:
the record came in parts. no_elements: the rank sent only statistics. failed: the process that measures failed on it.
not_stored: the store refused the errors. stopped: the daemon stopped before.
"""


@dataclass(frozen=True, slots=True)
class LabCounters:
    """The counters at one moment. cpu_s: the CPU time of the processes that measured."""

    records: dict[str, int]
    cpu_s: float
    restarts: int


@dataclass(slots=True)
class LabFigures:
    """The counters as several threads change them."""

    _records: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    _cpu_s: float = 0.0
    _restarts: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, outcome: str, number: int = 1) -> None:
        """Count records with an outcome."""
        with self._lock:
            self._records[outcome] += number

    def spend(self, cpu_s: float) -> None:
        """Count CPU time."""
        with self._lock:
            self._cpu_s += cpu_s

    def restart(self) -> None:
        """Count a process that was lost."""
        with self._lock:
            self._restarts += 1

    def read(self) -> LabCounters:
        """Return the counters of this moment."""
        with self._lock:
            return LabCounters(dict(self._records), self._cpu_s, self._restarts)
