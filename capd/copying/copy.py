"""Copies one run: all its files as they are, or chosen records into a new run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from capd.copying.building import building
from capd.copying.files import Progress, copy_tree, files_of
from capd.copying.records import RecordWriter
from capd.copying.remote import bring_run, files_at
from capd.errors import NothingMatched, StoreBusy
from capd.server.runs.root_lock import reading_lock
from capd.store.alerts.file import write_alerts
from capd.store.disk.failpoints import failpoint
from capd.store.disk.layout import nodes_of
from capd.store.format.frames import RecordRow
from capd.store.keeps.file import write_keeps
from capd.store.objects.address import Address, RunPlace
from capd.store.read.series import Series
from capd.store.read.store import Store, open_store
from capd.store.scan.survey import has_moved_shards
from capd.store.verify.run import run_identity
from capd_client.protocol.selection import Ranges

__all__ = ["Copied", "CopyOptions", "copy_run", "is_quiet", "planned_copy"]


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """The part of a run that is copied, and how.

    Attributes:
        series: Globs of the paths of series; empty for all.
        attempt: As in `Store.find`.
        iterations: Ranges such as `0-2,100-:100`, or `all`.
        statistics_only: Keep only the statistics of tensors.
        codec: The codec of the copy; None: that of the source.
    """

    series: tuple[str, ...] = ()
    attempt: int | str = "all"
    iterations: str = "all"
    statistics_only: bool = False
    codec: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the copy has the same bytes as the source."""
        return self == CopyOptions()

    def of(self, store: Store) -> list[Excerpt]:
        """Return the records to copy.

        Raises:
            ConfigError: `iterations` cannot be read.
            NothingMatched: There are none.
        """
        iterations = Ranges(self.iterations)
        everything = store.everything(self.attempt)
        named = [one for one in everything if any(fnmatchcase(one.path, glob) for glob in self.series)]
        # The errors of formats on records go with them.
        owners = {(one.key, one.dtype) for one in named if one.kept != "errors"}
        paths = {one.path for one in named}
        found = [
            Excerpt.of(one, None if self.iterations == "all" else iterations)
            for one in everything
            if not self.series
            or one.path in paths
            or (one.kept == "errors" and (one.key, one.dtype) in owners)
        ]
        found = [part for part in found if part.records]
        if not found:
            what = f"no series matches {' or '.join(map(repr, self.series))}" if self.series else "no record"
            if self.iterations != "all":
                what = f"no record is of iterations {self.iterations}"
            raise NothingMatched(f"{store.path}: {what}; `capd ls {store.path}` lists the series")
        return found


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The records of one series that are copied. iterations: those that they are of; None: all."""

    series: Series
    iterations: Ranges | None
    records: int
    raw_bytes: int

    @classmethod
    def of(cls, series: Series, iterations: Ranges | None) -> Excerpt:
        """Return the records of `series` at some iterations."""
        if iterations is None:
            return cls(series, None, len(series), series.raw_bytes)
        rows = [row for row in map(series.row, series.numbers) if row.moment.iteration in iterations]
        return cls(series, iterations, len(rows), sum(row.nbytes for row in rows))

    @property
    def is_errors(self) -> bool:
        """Whether they are errors of formats on records."""
        return self.series.kept == "errors"

    def leaves_out(self, row: RecordRow) -> bool:
        """Return whether a record of the series is not copied."""
        return self.iterations is not None and row.moment.iteration not in self.iterations


@dataclass(frozen=True, slots=True)
class Copied:
    """The content of a copy.

    Attributes:
        error_records: The errors of formats on records. No other number counts them.
        files: The copied files; 0 if records were copied.
    """

    series: int
    records: int
    error_records: int
    raw_bytes: int
    files: int


def planned_copy(source: RunPlace, part: CopyOptions) -> Copied:
    """Return what a copy would hold. Writes nothing."""
    if isinstance(source, Address):
        files = files_at(source) if part.is_whole else 0
    else:
        run_identity(source)
        files = sum(1 for _ in files_of(source)) if part.is_whole and not has_moved_shards(source) else 0
    return _sum(part.of(open_store(source)), files)


def copy_run(source: RunPlace, new: Path, part: CopyOptions, progress: Progress, threads: int = 1) -> Copied:
    """Copy a run. The path `new` does not exist before the copy is complete and checked.

    Args:
        source: The run, here or in an object store. If a daemon owns its store, or some shards were moved to an object
            store, the records that it has now are copied one by one.
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
    place = source if isinstance(source, Address) else source.resolve()
    order = {"command": "cp", "source": str(place), **asdict(part)}
    with building(new, order) as built:
        if built.is_published:
            return planned
        records = None
        with contextlib.ExitStack() as stack:
            if part.is_whole and isinstance(source, Address):
                records = bring_run(source, built.run, progress)
            elif part.is_whole and isinstance(source, Path) and _is_copied_whole(source, stack):
                copy_tree(source, built.run, progress)
            else:
                planned = _copy_records(source, built.root, new.stem, part, progress, threads)
                records = planned.records + planned.error_records
        built.publish(records)
    return planned


def _is_copied_whole(source: Path, stack: contextlib.ExitStack) -> bool:
    """Return whether the files of a run are copied: nobody writes them, and no stub is among them.

    A copy of a stub would be a run that needs the object store of another one.
    """
    return is_quiet(source, stack) and not has_moved_shards(source)


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
    source: RunPlace, root: Path, name: str, part: CopyOptions, progress: Progress, threads: int
) -> Copied:
    store = open_store(source)
    parts = part.of(store)
    with RecordWriter(
        root, name, progress, codec=part.codec, statistics_only=part.statistics_only, threads=threads
    ) as writer:
        # In this order, a writer's open shards and pending records stay few.
        for one in sorted(parts, key=lambda one: (one.series.node, one.series.path)):
            writer.copy(one.series, shift=lambda _: 0, skip=one.leaves_out)
            failpoint("copy.after_series")
        for node, session in store.sessions_by_node():
            writer.store(node).save_session(session)
        writer.finish()
    iterations = Ranges(part.iterations)
    write_alerts(
        root / f"{name}.zarr",
        {
            node: [one for one in alerts if one.iteration in iterations]
            for node, alerts in store.alerts_by_node().items()
        },
    )
    write_keeps(
        root / f"{name}.zarr",
        {
            node: [one for one in keeps if iterations.meets(Ranges(f"{one.first}-{one.last}"))]
            for node, keeps in store.keeps_by_node().items()
        },
    )
    failpoint("copy.after_records")
    return _sum(parts, 0)


def _sum(parts: Sequence[Excerpt], files: int) -> Copied:
    tensors = [one for one in parts if not one.is_errors]
    errors = sum(one.records for one in parts if one.is_errors)
    records, raw_bytes = sum(one.records for one in tensors), sum(one.raw_bytes for one in tensors)
    return Copied(len(tensors), records, errors, raw_bytes, files)
