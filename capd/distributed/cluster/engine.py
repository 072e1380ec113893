"""Feeds a cluster with tasks, a few for each worker at a time, and tells what became of each."""

from __future__ import annotations

import itertools
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, TypeAlias

from capd._version import __version__
from capd.distributed.cluster.workers import guarded
from capd.errors import CapdError
from capd.store.read.series import import_extra

__all__ = ["Engine", "Job", "LostTask"]

# It types only some of its calls.
distributed: Any = import_extra("distributed", "distributed")
Client: TypeAlias = Any
Future: TypeAlias = Any
# The tasks for each thread of the workers that are known to the scheduler at once: one runs, one waits. It rarely moves
# a waiting task to another worker, so that more of them leave workers without work at the end.
_WINDOW = 2


class LostTask(NamedTuple):
    """A task whose workers died, and why that is known."""

    reason: str


class Job(NamedTuple):
    """What runs on a worker. `place`: its place in a tree of merges, the level and the number."""

    place: tuple[int, int]
    function: Callable[[Any], bytes]
    argument: Any


class Engine:
    """A cluster that runs functions. What is left when it is closed is cancelled."""

    def __init__(self, client: Client, *, retries: int, memory_limit: int | None) -> None:
        self.client, self.memory_limit = client, memory_limit
        self._retries, self._names = retries, itertools.count()
        # Two commands on one cluster do not share tasks.
        self._token = uuid.uuid4().hex[:16]

    @property
    def workers(self) -> int:
        """The number of workers that are alive."""
        return len(self.client.scheduler_info()["workers"])

    def submit(self, function: Callable[..., bytes], *arguments: Any) -> Future:
        """Begin a task. Arguments may be results of others, also in a list."""
        key = f"capd-{function.__name__}-{self._token}-{next(self._names)}"
        options = {"key": key, "retries": self._retries, "pure": False}
        return self.client.submit(guarded, __version__, function, *arguments, **options)

    def unordered(
        self, take: Callable[[], Job | None]
    ) -> Generator[tuple[Job, bytes | LostTask], None, None]:
        """Run jobs. Yield each with its outcome when it has ended.

        `take` returns the next job, or None as long as there is none. It is asked again when another one has ended.

        Raises:
            CapdError: As `outcome` does.
        """
        running: dict[Future, Job] = {}
        waiting: Any = distributed.as_completed(loop=self.client.loop, raise_errors=False)
        width = self._width

        def feed() -> None:
            while len(running) < width and (job := take()) is not None:
                future = self.submit(job.function, job.argument)
                running[future] = job
                waiting.add(future)

        try:
            feed()
            for future in waiting:
                found = self.outcome(future)
                yield running.pop(future), found
                # A result does not stay on a worker, where it could be lost again.
                del future
                feed()
        finally:
            self.client.cancel(list(running))

    def ordered(
        self, function: Callable[[bytes], bytes], tasks: Iterable[bytes]
    ) -> Generator[bytes | LostTask, None, None]:
        """Run tasks. Yield their results in order."""
        running: deque[Future] = deque()
        rest, width = iter(tasks), self._width
        try:
            while True:
                running += [
                    self.submit(function, one) for one in itertools.islice(rest, width - len(running))
                ]
                if not running:
                    return
                yield self.outcome(running[0])
                running.popleft()
        finally:
            self.client.cancel(list(running))

    def alone(self, function: Callable[[bytes], bytes], task: bytes) -> bytes | LostTask:
        """Run one task and wait for it. The death of its workers is its own doing if nothing else runs."""
        return self.outcome(self.submit(function, task))

    def outcome(self, future: Future) -> bytes | LostTask:
        """Wait for a task and return its result.

        Raises:
            CapdError: It failed for another reason than the death of its workers, or the scheduler is gone.
        """
        try:
            found: bytes = future.result()
            return found
        except distributed.KilledWorker as error:
            return LostTask(f"{error.allowed_failures + 1} workers died while they read it")
        except MemoryError:
            return LostTask("a worker had not enough memory for it")
        except CapdError:
            raise
        except Exception as error:
            if future.status != "error":
                raise CapdError(
                    f"the cluster is gone: {error or type(error).__name__}; start it and run the command again, "
                    "which goes on where it was with --checkpoint"
                ) from error
            raise CapdError(f"a task failed on a worker: {type(error).__name__}: {error}") from error

    @property
    def _width(self) -> int:
        threads: int = sum(self.client.nthreads().values())
        return _WINDOW * max(1, threads)
