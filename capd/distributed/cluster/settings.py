"""How a cluster is chosen: the scheduler, and the limits of the workers that capd starts itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from capd.errors import ConfigError

__all__ = ["PROCESSES", "THREADS", "ClusterSettings"]

THREADS, PROCESSES = "threads", "processes"
_SCHEMES = ("tcp", "tls", "ucx", "ucxx", "ws", "wss", "inproc")


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """The choice of a cluster.

    Attributes:
        scheduler: "processes", or the address of a scheduler, or a scheduler file.
        workers: The number of processes.
        memory_limit: The memory of each worker in bytes. None: its share of what is free, or what the cluster says.
        retries: How often a task that fails is run again.
        settles_heap: Whether workers get capd's setting of the heap. Without it a task takes twice the time.
    """

    scheduler: str
    workers: int = 1
    memory_limit: int | None = None
    retries: int = 2
    settles_heap: bool = True

    @property
    def is_own(self) -> bool:
        """Whether capd starts the cluster, and closes it."""
        return self.scheduler == PROCESSES

    def __post_init__(self) -> None:
        scheme, separator, _ = self.scheduler.partition("://")
        is_address = bool(separator) and scheme in _SCHEMES
        if self.is_own or is_address:
            return
        if not self.scheduler.endswith(".json"):
            raise ConfigError(
                f"--scheduler cannot be {self.scheduler!r}; use threads, processes, tcp://HOST:PORT or FILE.json"
            )
        if not Path(self.scheduler).is_file():
            raise ConfigError(
                f"--scheduler {self.scheduler}: there is no such file; `dask scheduler --scheduler-file` writes one"
            )
