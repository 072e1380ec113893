"""Copies one run: all its files as they are, or chosen records into a new run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from capd.copying.building import building
from capd.copying.files import Progress, copy_tree, files_of
from capd.copying.records import RecordWriter
from capd.errors import NothingMatched, StoreBusy
from capd.server.runs.root_lock import reading_lock
from capd.store.disk.failpoints import failpoint
from capd.store.disk.layout import nodes_of
from capd.store.read.series import Series
from capd.store.read.store import Store, open_store
from capd.store.verify.run import run_identity

__all__ = ["Copied", "CopyOptions", "copy_run", "is_quiet", "planned_copy"]


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """The part of a run that is copied, and how.

    Attributes:
        series: Globs of the paths of series; empty for all.
        attempt: As in `Store.find`.
        statistics_only: Keep only the statistics of tensors.
        codec: The codec of the copy; None: that of the source.
    """

    series: tuple[str, ...] = ()
    attempt: int | str = "all"
    statistics_only: bool = False
    codec: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the copy has the same bytes as the source."""
        return self == CopyOptions()

    def of(self, store: Store) -> list[Series]:
        """Return the series to copy. Raises NothingMatched if there are none."""
        found = [
            one
            for one in store.everything(self.attempt)
            if len(one) and (not self.series or any(fnmatchcase(one.path, glob) for glob in self.series))
        ]
        if not found:
            what = f"no series matches {' or '.join(map(repr, self.series))}" if self.series else "no record"
            raise NothingMatched(f"{store.path}: {what}; `capd ls {store.path}` lists the series")
        return found


@dataclass(frozen=True, slots=True)
class Copied:
    """The content of a copy. files: the copied files; 0 if records were copied."""

    series: int
    records: int
    raw_bytes: int
    files: int


def planned_copy(source: Path, part: CopyOptions) -> Copied:
    """Return what a copy would hold. Writes nothing."""
    run_identity(source)
    series = part.of(open_store(source))
    files = sum(1 for _ in files_of(source)) if part.is_whole else 0
    return Copied(len(series), sum(map(len, series)), sum(one.raw_bytes for one in series), files)


def copy_run(source: Path, new: Path, part: CopyOptions, progress: Progress, threads: int = 1) -> Copied:
    """Copy a run. The path `new` does not exist before the copy is complete and checked.

    Args:
        source: The run. If a daemon owns its store, the records that it has now are copied one by one.
        new: The path of the new run, which ends in `.zarr`.
        part: The part to copy.
        progress: Called with the bytes of each file or record.
        threads: The threads that encode.

    Raises:
        ConfigError: `new` cannot be the name of a new run, or holds another copy.
        NotAStore: `source` is not a run.
        NothingMatched: The part is empty.
        DamagedRecord: A record of the source cannot be read.
        StoreError: The copy cannot be written. The same call continues it.
    """
    planned = planned_copy(source, part)
    order = {"command": "cp", "source": str(source.resolve()), **asdict(part)}
    with building(new, order) as built:
        if built.is_published:
            return planned
        records = None
        with contextlib.ExitStack() as stack:
            if part.is_whole and is_quiet(source, stack):
                copy_tree(source, built.run, progress)
            else:
                planned = _copy_records(source, built.root, new.stem, part, progress, threads)
                records = planned.records
        built.publish(records)
    return planned


def is_quiet(run: Path, stack: contextlib.ExitStack) -> bool:
    """Keep daemons of this machine from a run's store until the stack closes. Return False if one owns it."""
    root = run.absolute().parent
    try:
        for node in nodes_of(run):
            stack.enter_context(reading_lock(root, node))
    except StoreBusy:
        return False
    return True


def _copy_records(
    source: Path, root: Path, name: str, part: CopyOptions, progress: Progress, threads: int
) -> Copied:
    store = open_store(source)
    series = part.of(store)
    with RecordWriter(
        root, name, progress, codec=part.codec, statistics_only=part.statistics_only, threads=threads
    ) as writer:
        for one in _by_node(series):
            writer.copy(one, shift=lambda _: 0, skip=lambda _: False)
            failpoint("copy.after_series")
        for node, session in store.sessions_by_node():
            writer.store(node).save_session(session)
        writer.finish()
    failpoint("copy.after_records")
    return Copied(len(series), sum(map(len, series)), sum(one.raw_bytes for one in series), 0)


def _by_node(series: Sequence[Series]) -> Iterator[Series]:
    # A writer's open shards and pending records stay few.
    return iter(sorted(series, key=lambda one: (one.node, one.path)))
