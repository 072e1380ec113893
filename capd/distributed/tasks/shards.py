"""The check of some shards as a task: the promises of their series are read where it runs, before the shards."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from capd.analyze.packed.codec import pack, unpack
from capd.store.format.frames import SeriesHeader
from capd.store.objects.address import Address, place_of
from capd.store.remote.node import shard_key
from capd.store.remote.objects import NamedObject, named_objects
from capd.store.remote.run import RemoteRun
from capd.store.verify.damage import Damage, Report
from capd.store.verify.fetched import FetchedRun
from capd.store.verify.node import look_at_node
from capd.store.verify.remote import readable_nodes
from capd.store.verify.run import Shard, all_ids, check_twice, run_identity
from capd.store.verify.series import promise_of

__all__ = ["check_task", "reports_of", "run_checks"]


class _CheckTask(NamedTuple):
    plan: str
    run: str
    shards: list[tuple[str, int]]


class _Findings(NamedTuple):
    records: int
    error_records: int
    nbytes: int
    damaged: list[Damage]
    notes: list[str]


def check_task(plan: str, run: str, shards: Sequence[Shard]) -> bytes:
    """Return the task that checks some shards of a run."""
    return pack(_CheckTask(plan, run, [(one.path, one.number) for one in shards]), _CheckTask)


def run_checks(task: bytes) -> bytes:
    """Run a task of `check_task`."""
    plan, place, shards = unpack(task, _CheckTask)
    run = _run(place, plan)
    return pack([_findings(run, path, number) for path, number in shards], list[_Findings])


def _findings(run: _RunHere, path: str, number: int) -> _Findings:
    run.fetch(path)
    promise, metadata = promise_of(run.path, run.ids, path, run.nodes)
    # The metadata is reported where the task was made.
    report = Report(run.path) if promise is None else check_twice(Shard(promise, number), run.present)
    if promise is None and not metadata.damaged:
        report.find("shard", run.path / path, f"shard {number} is gone", series=path)
    if promise is not None and (differs := run.difference(promise.header, number)) is not None:
        report.damaged.append(differs)
    return _Findings(report.records, report.error_records, report.nbytes, report.damaged, report.notes)


def reports_of(found: bytes, run: Path) -> list[Report]:
    """Return what `run_checks` found in each shard. Raises Damaged if it is nothing of that."""
    findings: list[_Findings] = unpack(found, list[_Findings])
    return [
        Report(run, 0, one.records, one.error_records, one.nbytes, one.damaged, one.notes) for one in findings
    ]


class _RunHere:
    """A run on this machine, as the tasks of a plan see it: its promises were read before the first shard."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ids = all_ids(path, run_identity(path, Report(path)))
        self.nodes = [look_at_node(path, node, self.ids) for node in sorted((path / ".capd").glob("node=*"))]

    def fetch(self, series: str) -> None:
        """Have the documents of a series here."""

    def present(self, header: SeriesHeader, shard: int) -> AbstractContextManager[None]:
        """Have a shard here for the time of a check."""
        return contextlib.nullcontext()

    def difference(self, header: SeriesHeader, shard: int) -> Damage | None:
        """Return how a shard that was checked differs from the manifest."""
        return None


class _RunFetched(_RunHere):
    """A run in an object store. Its files come here as they are needed."""

    def __init__(self, place: Address) -> None:
        source = RemoteRun(place)
        nodes = list(readable_nodes(source, Report(place)))
        self._files = FetchedRun(source, nodes)
        self._objects: dict[str, list[NamedObject]] = defaultdict(list)
        for one in named_objects(nodes):
            if one.series or one.key == "zarr.json":
                self._objects[one.series].append(one)
        self._lock = threading.Lock()
        self.fetch("")
        self._files.write_catalogs()
        super().__init__(self._files.path)

    def fetch(self, series: str) -> None:
        # Once: a second time would take a shard from a check in another thread.
        with self._lock:
            self._files.fetch(self._objects.pop(series, ()))

    def present(self, header: SeriesHeader, shard: int) -> AbstractContextManager[None]:
        return self._files.present(header, shard)

    def difference(self, header: SeriesHeader, shard: int) -> Damage | None:
        return self._files.damaged.get(shard_key(header, shard))


@lru_cache(2)
def _run(place: str, plan: str) -> _RunHere:
    """Return a run. It is opened once for each plan."""
    where = place_of(place)
    return _RunFetched(where) if isinstance(where, Address) else _RunHere(where)
