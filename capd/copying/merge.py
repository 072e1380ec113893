"""Merges runs into a new one: parts of one job from several stores, or jobs that are attempts of one run.

A series that only one run has is linked: its sealed shards get a second name, and take no space. Other series are
copied record by record, one run after the other, and so are series whose shards were moved to an object store. The
attempts of a run that repeats those of an earlier one are counted on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from capd.copying.building import Building, building
from capd.copying.copy import is_quiet
from capd.copying.files import Progress, link_file
from capd.copying.measured import Capture, captures_measured, rows_of_errors
from capd.copying.records import RecordWriter
from capd.errors import ConfigError, NothingMatched, StoreError
from capd.store.alerts.alert import Alert
from capd.store.alerts.file import write_alerts
from capd.store.catalog.rows import SessionRow
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import make_directory, rename, sync_paths, write_file
from capd.store.documents.zarr_json import group_document, run_ids
from capd.store.format.frames import FORMAT_VERSION, UNKNOWN_CLIENT, RecordRow
from capd.store.keeps.file import distinct_keeps, write_keeps
from capd.store.keeps.keep import Keep
from capd.store.read.series import Series
from capd.store.read.store import Store, open_store
from capd.store.scan.survey import moved_shards
from capd.store.verify.run import run_identity

__all__ = ["Merged", "merge_runs", "planned_merge"]


@dataclass(slots=True)
class MergeSource:
    """One run of a merge.

    Attributes:
        run: Its directory.
        shift: What is added to the attempts of its own clients.
        shared: The clients that an earlier run has, too.
        repeated: The captures that an earlier run has, with the same bytes.
        unshifted: The rows of errors on records of shared clients.
        known: The rows of errors on captures whose errors an earlier run has.
        linked: The series whose files are linked.
        copied: The series whose records are copied.
    """

    run: Path
    store: Store
    series: list[Series]
    shift: int = 0
    shared: set[bytes] = field(default_factory=set)
    repeated: set[Capture] = field(default_factory=set)
    unshifted: set[Capture] = field(default_factory=set)
    known: set[Capture] = field(default_factory=set)
    linked: list[Series] = field(default_factory=list)
    copied: list[Series] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Merged:
    """The content that one run brings to a merge.

    Attributes:
        error_records: The errors of formats on records. No other number counts them.
        shift: What is added to its attempts.
    """

    run: Path
    records: int
    error_records: int
    repeated: int
    linked_series: int
    copied_series: int
    shift: int


def planned_merge(runs: Sequence[Path]) -> list[Merged]:
    """Return what each run would bring. Writes nothing. Raises as `merge_runs`."""
    return [_said(source) for source in _plan(runs, linkable=True)]


def merge_runs(runs: Sequence[Path], new: Path, progress: Progress) -> list[Merged]:
    """Merge runs. The path `new` does not exist before the run is complete and checked.

    Args:
        runs: The runs, at least two, in the order of their attempts.
        new: The path of the new run, which ends in `.zarr`.
        progress: Called with the bytes of each file or record.

    Raises:
        ConfigError: A run is named twice, or `new` cannot be the name of a new run.
        NotAStore: A path is not a run.
        NothingMatched: No run has a record.
        DamagedRecord: A record cannot be read.
        StoreError: Two runs hold one capture with different bytes, or the new run cannot be written.
    """
    order = {"command": "merge", "sources": [str(run.resolve()) for run in runs]}
    with contextlib.ExitStack() as stack:
        linkable = all(is_quiet(run, stack) for run in runs)
        sources = _plan(runs, linkable=linkable)
        with building(new, order) as built:
            if not built.is_published:
                _write(sources, built, progress)
                brought = [_said(source) for source in sources]
                built.publish(sum(one.records + one.error_records for one in brought))
    return [_said(source) for source in sources]


def _plan(runs: Sequence[Path], *, linkable: bool) -> list[MergeSource]:
    if len({run.resolve() for run in runs}) < len(runs) or len(runs) < 2:
        raise ConfigError("name at least two runs to merge, each of them once")
    for run in runs:
        run_identity(run)
    stores = [open_store(run) for run in runs]
    sources = [MergeSource(run, store, store.everything()) for run, store in zip(runs, stores, strict=True)]
    if not any(source.series for source in sources):
        raise NothingMatched(f"none of {', '.join(map(str, runs))} has a record")
    for at, source in enumerate(sources):
        _compare(source, sources[:at])
    taken: set[str] = set()
    for source in sources:
        for series in source.series:
            # A link to a stub would be a run that needs the object store of another one.
            is_here = not moved_shards(source.run, series.path)
            is_plain = linkable and series.is_sealed and bool(series.node) and is_here
            changes = source.shift or source.repeated or source.known
            if is_plain and not changes and series.path not in taken:
                source.linked.append(series)
            else:
                source.copied.append(series)
            taken.add(series.path)
    return sources


def _compare(source: MergeSource, earlier: Sequence[MergeSource]) -> None:
    """Find what a run shares with the runs before it."""
    before = [row for one in earlier for row in _sessions(one)]
    known = {row.client for row in before}
    own = [row for row in source.store.sessions if row.client not in known]
    source.shared = {row.client for row in source.store.sessions} & known
    if source.shared:
        source.repeated = _repeated(source, earlier)
        _follow_records(source, earlier)
    pairs = {(row.rank, row.attempt) for row in before} | {
        pair for one in earlier if not one.store.sessions for pair in _pairs(one.series, one.shift)
    }
    mine = {(row.rank, row.attempt) for row in own} or (
        set() if source.shared else set(_pairs(source.series, 0))
    )
    if pairs & mine:
        source.shift = 1 + max(attempt for _, attempt in pairs)


def _follow_records(source: MergeSource, earlier: Sequence[MergeSource]) -> None:
    """Find the rows of errors on records of shared clients. Rows have clients of their own."""
    before = {capture for one in earlier for capture in captures_measured(one.series)}
    for row, of in rows_of_errors(source.series):
        if of[0] in source.shared:
            source.unshifted.add((row.client, row.sequence))
            if of in before:
                source.known.add((row.client, row.sequence))


def _sessions(source: MergeSource) -> Iterator[SessionRow]:
    """Yield the sessions of a run as the merged run has them."""
    for _, row in source.store.sessions_by_node():
        yield _shifted(row, source)


def _shifted(row: SessionRow, source: MergeSource) -> SessionRow:
    if not source.shift or row.client in source.shared:
        return row
    return replace(row, attempt=row.attempt + source.shift, shift=row.shift + source.shift)


def _pairs(series: Sequence[Series], shift: int) -> Iterator[tuple[int, int]]:
    """Yield the ranks and attempts of the records of a run without sessions."""
    for one in series:
        for moment in one.moments:
            yield one.key.rank, moment.attempt + shift


def _repeated(source: MergeSource, earlier: Sequence[MergeSource]) -> set[Capture]:
    """Return the captures that an earlier run has, too.

    Raises:
        StoreError: The two differ.
    """
    held: dict[Capture, tuple[Series, int]] = {}
    for one in earlier:
        for series, number, row in _rows(one, source.shared):
            held[row.client, row.sequence] = (series, number)
    found: set[Capture] = set()
    for series, number, row in _rows(source, source.shared):
        other = held.get((row.client, row.sequence))
        if other is None:
            continue
        before, at = other
        same = (before.key, before.dtype) == (series.key, series.dtype)
        same = same and before.row(at).capture == row.capture
        if not same or before.read(at).tobytes() != series.read(number).tobytes():
            raise StoreError(
                f"{series.path}#{number} of {source.run} and {before.path}#{at} of an earlier run are one "
                "capture with different bytes; these runs cannot be merged"
            )
        found.add((row.client, row.sequence))
    return found


def _rows(source: MergeSource, clients: set[bytes]) -> Iterator[tuple[Series, int, RecordRow]]:
    for series in source.series:
        for number in series.numbers:
            row = series.row(number)
            if row.client in clients and row.client != UNKNOWN_CLIENT:
                yield series, number, row


def _write(sources: Sequence[MergeSource], built: Building, progress: Progress) -> None:
    _root_document(sources, built)
    for source in sources:
        for series in source.linked:
            _link(source.run, series.path, built.run, progress)
            failpoint("copy.after_series")
    _sync_tree(built.run)
    failpoint("copy.after_files")
    # The catalog is built from the linked shards when the writer opens a node's part.
    with RecordWriter(built.root, built.new.stem, progress) as writer:
        for source in sources:
            for node in sorted({series.node for series in source.linked}):
                writer.store(node)
        for source in sources:
            shift = _shift_of(source)
            for series in sorted(source.copied, key=lambda one: (one.node, one.path)):
                writer.copy(series, shift=shift, skip=lambda row, s=source: _is_repeated(row, s))  # type: ignore[misc]
                failpoint("copy.after_series")
            for node, row in source.store.sessions_by_node():
                if row.client not in source.shared:
                    writer.store(node).save_session(_shifted(row, source))
        writer.finish()
    write_alerts(built.run, _alerts(sources))
    write_keeps(built.run, _keeps(sources))
    failpoint("copy.after_records")


def _alerts(sources: Sequence[MergeSource]) -> dict[str, list[Alert]]:
    """Return the alerts of all runs by node, in order of time. An alert that two runs have comes once."""
    found: dict[str, list[Alert]] = {}
    for source in sources:
        for node, alerts in source.store.alerts_by_node().items():
            held = found.setdefault(node, [])
            held += [one for one in alerts if one not in held]
    return {node: sorted(alerts, key=lambda one: one.time_ns) for node, alerts in found.items()}


def _keeps(sources: Sequence[MergeSource]) -> dict[str, list[Keep]]:
    """Return the keeps of all runs by node, with the attempts of the merged run. One that two runs have comes once."""
    found: dict[str, list[Keep]] = {}
    for source in sources:
        for node, keeps in source.store.keeps_by_node().items():
            shifted = (structs.replace(one, attempt=one.attempt + source.shift) for one in keeps)
            found.setdefault(node, []).extend(shifted)
    return {node: distinct_keeps(keeps) for node, keeps in found.items()}


def _shift_of(source: MergeSource) -> Callable[[RecordRow], int]:
    def shift(row: RecordRow) -> int:
        stays = row.client in source.shared or (row.client, row.sequence) in source.unshifted
        return 0 if stays else source.shift

    return shift


def _is_repeated(row: RecordRow, source: MergeSource) -> bool:
    return (row.client, row.sequence) in source.repeated or (row.client, row.sequence) in source.known


def _root_document(sources: Sequence[MergeSource], built: Building) -> None:
    """Write the run's own document, which names the runs whose files are linked."""
    document = built.run / "zarr.json"
    if document.exists():
        return
    ids = dict.fromkeys(name for source in sources for name in sorted(run_ids(source.run)))
    attributes = {"format": FORMAT_VERSION, "run_id": built.new.stem, "merged_from": list(ids)}
    make_directory(built.run)
    temporary = built.root / "document.tmp"
    write_file(temporary, group_document({"capd": attributes}))
    sync_paths([temporary], built.root)
    rename(temporary, document)


def _link(source: Path, path: str, target: Path, progress: Progress) -> None:
    """Link the files of a series, and those of the groups above it."""
    place = source / path
    for group in reversed(Path(path).parents):
        document = group / "zarr.json"
        if group != Path() and (source / document).is_file():
            link_file(source / document, target / document)
    # Documents last: a series without its shards is never described.
    files = sorted(
        (one for one in place.rglob("*") if one.is_file()), key=lambda one: one.name == "zarr.json"
    )
    for file in files:
        if file.is_symlink():
            raise StoreError(f"{file} is a symbolic link; a run has none")
        progress(link_file(file, target / file.relative_to(source)))


def _sync_tree(run: Path) -> None:
    sync_paths([path for path in run.rglob("*") if path.is_dir() or path.is_file()], run)


def _said(source: MergeSource) -> Merged:
    tensors = [one for one in source.series if one.kept != "errors"]
    records = sum(map(len, tensors))
    return Merged(
        source.run,
        records - len(source.repeated),
        sum(map(len, source.series)) - records - len(source.known),
        len(source.repeated),
        _number(source.linked),
        _number(source.copied),
        source.shift,
    )


def _number(series: Sequence[Series]) -> int:
    return sum(one.kept != "errors" for one in series)
