"""Builds a damaged series anew from its sound records, and swaps it in for the damaged one as a whole.

The records keep their order and are numbered densely again, because plain Zarr readers may never see a hole.
The new series grows beside the old one, in the quarantine, and then they change places:

    NAME.building   half-built: removed by whoever finds it
    NAME.json       what was lost, and where the series belongs
    NAME.rebuilt    whole and durable, about to change places with the series; behind that, the damaged version
    NAME            the damaged version

Nothing is ever gone in between: a kill at any step leaves the series as it was or as it will be. Whoever calls
this takes the catalog's `complete` mark away before, and has it rebuilt after.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from capd.store.columns import ColumnRow, Columns
from capd.store.dtypes import stored_shape
from capd.store.failpoints import failpoint
from capd.store.files import (
    exchange,
    make_directory,
    remove_tree,
    rename,
    sync_paths,
    write_file,
)
from capd.store.frames import UNKNOWN_CLIENT, FileHeader, RecordRow, SeriesHeader
from capd.store.headers import SERIES_PATH
from capd.store.layout import Layout, node_directory, shard_path
from capd.store.mend import set_aside
from capd.store.open_files import OpenFiles
from capd.store.partials import partials_of
from capd.store.salvage import Salvaged, ShardSource, write_records
from capd.store.shards import ShardWriter
from capd.store.spool_copies import Capture, SpoolCopies
from capd.store.survey import shard_files
from capd_client.key import Moment

__all__ = ["Rebuilt", "finish_swaps", "rebuild_series"]

logger = logging.getLogger(__name__)

_NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})
Rows = Callable[[int, int], Mapping[int, RecordRow]]
Occasion = tuple[Moment, tuple[int, ...]]  # moment and shape


@dataclass(slots=True)
class Rebuilt:
    """lost: old record numbers, with their moments where known. kept: records of the new series. added: of these, how
    many stood in the spool alone and come last. quarantine: where the damaged version is."""

    path: str
    lost: dict[int, RecordRow | None] = field(default_factory=dict)
    kept: int = 0
    added: int = 0
    quarantine: Path = Path()


def rebuild_series(
    layout: Layout,
    file_header: FileHeader,
    header: SeriesHeader,
    count: int,
    rows: Rows,
    copies: SpoolCopies,
) -> Rebuilt:
    """Build the series of `header` anew and swap it in. Raises OSError or StoreError; then nothing has changed.

    file_header: of this run and node. count: record numbers in use. rows: what is known of records first ≤ n < last
    beside the COMMITs of the series' own shards, for those whose COMMIT is lost. copies: what the spool has
    of the series; records that are in no sealed shard come last. Its `.partial` files, which have old numbers, move to
    the quarantine.
    """
    quarantine = node_directory(layout.run, layout.node) / "quarantine"
    done = Rebuilt(header.path, quarantine=_free(quarantine, header.path))
    building = done.quarantine.with_name(f"{done.quarantine.name}.building")
    remove_tree(building)
    layout.dirty.update(make_directory(building / "data"))
    new = _NewSeries(building, file_header, header)
    done.kept = new.write(_sound(layout.run, header, count, rows, copies, done))
    if done.kept:
        disguised = msgspec.structs.replace(header, path=str(building.relative_to(layout.run)))
        layout.publish([(disguised, new.columns, (done.kept, *new.extents))])
        sync_paths([*building.rglob("*"), building, quarantine], layout.run)
    write_file(done.quarantine.with_name(f"{done.quarantine.name}.json"), _report(done))
    sync_paths([done.quarantine.with_name(f"{done.quarantine.name}.json"), quarantine], layout.run)
    if not (layout.run / header.path).exists():
        layout.ensure_groups((layout.run / header.path).parent)
        layout.sync()
    _swap(layout.run / header.path, building, done)
    # Behind the swap: what a kill leaves of them here, recovery knows to be of before by their captures.
    for path in partials_of(layout.spool, header.path):
        set_aside(path, quarantine, "its series is built anew")
    sync_paths([quarantine, (layout.run / header.path).parent], layout.run)
    return done


class _NewSeries:
    """The shards of the new series, one open at a time."""

    def __init__(self, directory: Path, file_header: FileHeader, header: SeriesHeader) -> None:
        self._columns: list[ColumnRow] = []
        self.extents: tuple[int, ...] = ()
        self._directory, self._file_header, self._header = directory, file_header, header
        self._files = OpenFiles(4, durable=False)
        self._shard: ShardWriter | None = None

    @property
    def columns(self) -> Columns:
        """Moments and shapes of what was written."""
        return Columns(0, self._columns)

    def write(self, records: Iterator[tuple[RecordRow, Salvaged]]) -> int:
        """Write all records and finish the last shard; returns how many there were."""
        try:
            count = write_records(self._header, 0, self._noted(records), self._shard_for)
            self._finish()
        finally:
            self._files.close()
        return count

    def _noted(self, records: Iterator[tuple[RecordRow, Salvaged]]) -> Iterator[tuple[RecordRow, Salvaged]]:
        for row, salvaged in records:
            self._columns.append((*msgspec.structs.astuple(row.moment), row.shape))
            shape = stored_shape(self._header.dtype, row.shape)
            self.extents = tuple(map(max, self.extents or shape, shape))
            yield row, salvaged

    def _shard_for(self, record: int) -> ShardWriter:
        number = record // self._header.geometry.shard_records
        if self._shard is None or self._shard.number != number:
            self._finish()
            place = shard_path(Path(), msgspec.structs.replace(self._header, path=""), number)
            path = self._directory / place
            make_directory(path.parent)
            shard = msgspec.structs.replace(self._file_header, series=self._header, shard=number)
            self._shard = ShardWriter.create(path, self._files, shard)
        return self._shard

    def _finish(self) -> None:
        if self._shard is not None:
            self._shard.write_index(self._header.geometry.shard_slots)
            self._files.forget(self._shard.path)
            self._shard = None


def _sound(
    run: Path, header: SeriesHeader, count: int, rows: Rows, copies: SpoolCopies, done: Rebuilt
) -> Iterator[tuple[RecordRow, Salvaged]]:
    files, per_shard = shard_files(run / header.path), header.geometry.shard_records
    seen: set[Capture] = set()
    nameless: set[Occasion] = set()  # of the kept records whose capture is lost
    added: set[Occasion] = set()
    for number in range(-(-count // per_shard)):
        first, last = number * per_shard, min(count, (number + 1) * per_shard)
        known = rows(first, last)
        with contextlib.ExitStack() as stack:
            source: ShardSource | None = None
            if number in files:
                with contextlib.suppress(OSError):
                    source = stack.enter_context(ShardSource(files[number], header, number))
            own = source.scanned.rows if source is not None else {}
            for record in range(first, last):
                row = own.get(record) or known.get(record)
                taken = None if source is None or row is None else source.take(record, row)
                found = None if row is None or taken is None else (row, taken)
                found = found or (None if row is None else copies.take(header, row))
                if found is None:
                    done.lost[record] = row
                    continue
                if found[0].client == UNKNOWN_CLIENT:
                    nameless.add((found[0].moment, found[0].shape))
                seen.add((found[0].client, found[0].sequence))
                yield found
    for row, taken in copies.others(header, seen):
        if (row.moment, row.shape) not in nameless:
            done.added += 1
            added.add((row.moment, row.shape))
            yield row, taken
    done.lost = {
        n: row for n, row in done.lost.items() if row is None or (row.moment, row.shape) not in added
    }


def _free(quarantine: Path, series_path: str) -> Path:
    """A name in the quarantine that nothing has yet."""
    leaf = series_path.rsplit("/", 1)[-1][:80]
    name = f"{leaf}-{hashlib.blake2b(series_path.encode(), digest_size=8).hexdigest()}"
    candidate, count = quarantine / name, 0
    while any(os.path.lexists(f"{candidate}{suffix}") for suffix in ("", ".rebuilt", ".json")):
        count += 1
        candidate = quarantine / f"{name}.{count}"
    return candidate


def _report(done: Rebuilt) -> bytes:
    lost = [
        {"record": number, "moment": None if row is None else msgspec.structs.asdict(row.moment)}
        for number, row in done.lost.items()
    ]
    return json.dumps({"series": done.path, "kept": done.kept, "lost": lost}, indent=1).encode()


def _swap(series: Path, building: Path, done: Rebuilt) -> None:
    if not done.kept:
        remove_tree(building)
        rename(series, done.quarantine)
        return
    rebuilt = building.with_suffix(".rebuilt")
    rename(building, rebuilt)
    if not series.exists():
        rename(rebuilt, series)
        return
    failpoint("rebuild.before_exchange")
    try:
        exchange(rebuilt, series)
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            raise
        rename(series, done.quarantine)
        rename(rebuilt, series)
    else:
        failpoint("rebuild.after_exchange")
        rename(rebuilt, done.quarantine)


def finish_swaps(run: Path, quarantine: Path) -> None:
    """Bring to an end what a kill interrupted: half-built series go, no series stays without a place."""
    for path in quarantine.glob("*.building"):
        remove_tree(path)
    for path in quarantine.glob("*.rebuilt"):
        try:
            series = json.loads(path.with_suffix(".json").read_bytes())["series"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if not isinstance(series, str) or not SERIES_PATH.match(series):
            continue
        if (run / series).exists():
            final = path.with_suffix("")
            set_aside(path, quarantine, "left by an interrupted repair") if final.exists() else rename(
                path, final
            )
        else:
            rename(path, run / series)
            logger.warning("%s: an interrupted repair is finished", series)
