"""The job of `capd plan`: runs in its own process group until every rank is planned, then is ended."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from pathlib import Path

from capd.cli.jobs.process_group import GroupJob, has_variable
from capd_client.planning.seen import RankSeen
from capd_client.process.documents import left

__all__ = ["PlannedJob", "documents"]

_LOOK_S = 0.1
# A rank may lag by this time, or by two of the longest steps, after the first complete rank.
_STRAGGLER_S = 30.0


def documents(directory: Path) -> list[RankSeen]:
    """Return the documents that the job's processes wrote until now. For a restarted rank, take the farthest ones."""
    of_rank: dict[int, dict[tuple[bool, bool], list[RankSeen]]] = {}
    for one in left(directory, RankSeen):
        far = (one.state == "complete", bool(one.series))
        of_rank.setdefault(one.rank, {}).setdefault(far, []).append(one)
    return [one for found in of_rank.values() for one in found[max(found)]]


class PlannedJob(GroupJob):
    """The job, with `directory` for the documents of its processes. Its output goes to stderr."""

    def __init__(self, command: Sequence[str], environ: dict[str, str], directory: Path) -> None:
        super().__init__(command, environ, mark=f"CAPD_PLAN={directory}")
        self._directory = directory

    def start(self) -> None:
        """Start the job.

        Raises:
            OSError: If the command cannot be executed.
        """
        self._start(2)

    def wait(self, timeout_s: float, *, all_nodes: bool) -> int | None:
        """Wait until every rank is planned, the job has ended, or `timeout_s` has passed.

        Return the exit code of the job, None while it runs. `all_nodes`: whether every rank means those of all nodes.
        """
        deadline, first_complete = time.monotonic() + timeout_s, 0.0
        while time.monotonic() < deadline:
            code = self.process.poll()
            if code is not None:
                return code
            seen = documents(self._directory)
            complete = [one for one in seen if one.state == "complete"]
            if complete and not first_complete:
                first_complete = time.monotonic()
            wanted = max((one.world_size if all_nodes else one.local_world_size for one in seen), default=1)
            if len(complete) >= wanted and not any(self._trains(one) for one in seen):
                return None
            if first_complete and time.monotonic() - first_complete > _patience(complete):
                return None
            time.sleep(_LOOK_S)
        return self.process.poll()

    def _trains(self, one: RankSeen) -> bool:
        """Return whether `wait` must still wait for a rank."""
        here = one.host == socket.gethostname()
        return one.state == "running" and (not here or has_variable(one.pid, self.mark))


def _patience(complete: Sequence[RankSeen]) -> float:
    longest = max((i.seconds or 0.0 for one in complete for i in one.iterations), default=0.0)
    return max(_STRAGGLER_S, 2 * longest)
