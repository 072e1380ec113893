"""The options that give the work of a command to other processes, and the progress of that work."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from capd.cli.completion import any_of
from capd.cli.options import option
from capd.cli.output import human_nbytes
from capd.cli.progress import StatusLine
from capd.cli.signals import leaving_on_signals, signals_put_off
from capd.errors import ConfigError

if TYPE_CHECKING:
    from capd.distributed.cluster.engine import Engine
    from capd.distributed.cluster.settings import ClusterSettings

__all__ = ["ByteProgress", "ClusterOptions", "TaskBytes", "task_size"]

_CELLS = 12
# Without a terminal, a line of JSON on stderr says now and then how far the work is.
_LINE_S = 10.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

TaskBytes = Annotated[
    str | None,
    option("--task-bytes", "SIZE", "Records of each task; 64MiB to 512MiB are good sizes [default: 256MiB]."),
]


def task_size(given: str | None) -> int:
    """Return the bytes of a task. Raises ConfigError if `given` is no size."""
    from capd.distributed.tasks.planning import size_of

    return size_of("--task-bytes", given or "256MiB")


@dataclass(frozen=True)
class ClusterOptions:
    """The options that choose a cluster. With "threads" there is none."""

    scheduler: Annotated[
        str,
        option(
            "--scheduler",
            "threads|processes|tcp://HOST:PORT|FILE.json",
            "Who works: threads here, processes here, or the workers of a Dask scheduler.",
            autocompletion=any_of("threads", "processes"),
        ),
    ] = "threads"
    task_bytes: TaskBytes = None
    memory_limit: Annotated[
        str | None,
        option("--memory-limit", "SIZE", "Memory of each worker [default: its share of what is free]."),
    ] = None
    retries: Annotated[
        int | None,
        option("--retries", "N", "How often a failed task runs again [default: 2].", min=0, max=100),
    ] = None
    checkpoint: Annotated[
        Path | None,
        option("--checkpoint", "DIR", "Keep what is done in DIR; the same command goes on from there."),
    ] = None

    @property
    def is_used(self) -> bool:
        """Whether a cluster works. Raises ConfigError for an option that means nothing without one."""
        if self.scheduler != "threads":
            return True
        of_tasks = {
            "--task-bytes": self.task_bytes,
            "--memory-limit": self.memory_limit,
            "--retries": self.retries,
            "--checkpoint": self.checkpoint,
        }
        for name, given in of_tasks.items():
            if given is not None:
                raise ConfigError(
                    f"{name} is for tasks; give --scheduler processes or the address of a scheduler"
                )
        return False

    def refuse_checkpoint(self, what: str) -> None:
        """Raise ConfigError if a checkpoint is requested, which this kind of work has not."""
        if self.checkpoint is not None:
            raise ConfigError(f"--checkpoint keeps the tasks of formats and reports; {what} has none")

    @property
    def task_nbytes(self) -> int:
        """The bytes of a task. Raises ConfigError if `task_bytes` is no size."""
        return task_size(self.task_bytes)

    def settings(self, workers: int) -> ClusterSettings:
        """Return the choice of the cluster. Raises ConfigError for a scheduler or a size that is none."""
        from capd.distributed.cluster.settings import ClusterSettings
        from capd.distributed.tasks.planning import size_of

        limit = self.memory_limit
        return ClusterSettings(
            scheduler=self.scheduler,
            workers=workers,
            memory_limit=None if limit is None else size_of("--memory-limit", limit, (1, 1 << 50)),
            retries=ClusterSettings.retries if self.retries is None else self.retries,
        )

    @contextlib.contextmanager
    def engine(
        self, workers: int, runs: Sequence[str], largest: tuple[int, str] = (0, "")
    ) -> Iterator[Engine]:
        """Open the cluster for some runs. The largest record, and the series that has it, must fit its memory.

        Raises:
            ConfigError: It does not fit, or an option is wrong.
            CapdError: As `opened_engine` does.
        """
        from capd.distributed.cluster.opening import memory_limit_of, opened_engine
        from capd.store.read.series import import_extra

        settings = self.settings(workers)
        import_extra("distributed", "distributed")
        from capd.distributed.cluster.checks import check_memory

        check_memory(*largest, memory_limit_of(settings))
        # Half a cluster cannot be closed.
        starting = signals_put_off(_ENDING) if settings.is_own else contextlib.nullcontext()
        with leaving_on_signals(), contextlib.ExitStack() as stack:
            with starting:
                engine = stack.enter_context(opened_engine(settings, runs))
            check_memory(*largest, engine.memory_limit)
            yield engine


class ByteProgress(StatusLine):
    """A bar over the bytes of tasks, with the workers that are alive."""

    def __init__(self, total: int, engine: Engine, *, done: int = 0) -> None:
        super().__init__()
        self._total, self._engine, self._done, self._before = total, engine, done, done
        self._began = self._told = time.monotonic()

    def add(self, nbytes: int) -> None:
        """Count a task that is done."""
        self._done += nbytes
        now = time.monotonic()
        if self._drawn:
            self.draw(self.line(now))
        elif now - self._told >= _LINE_S:
            self._told = now
            print(json.dumps({"progress": self.numbers()}), file=sys.stderr, flush=True)

    def numbers(self) -> dict[str, Any]:
        """Return the progress as JSON values."""
        return {"bytes": self._done, "of_bytes": self._total, "workers": self._engine.workers}

    def line(self, now: float) -> str:
        """Return the bar at the time `now` (monotonic)."""
        filled = min(_CELLS, _CELLS * self._done // max(1, self._total))
        rate = (self._done - self._before) / max(1e-3, now - self._began)
        return (
            f"[{'#' * filled}{'.' * (_CELLS - filled)}] {human_nbytes(self._done)} of {human_nbytes(self._total)}, "
            f"{human_nbytes(rate)}/s, workers: {self._engine.workers}"
        )
