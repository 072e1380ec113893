"""The read API: a Store, its Series and their Records. Imports neither torch nor zarr until an array needs it.

A Store sees all committed records of all nodes, sealed or not. `Series.zarr` sees only sealed records, as plain Zarr
readers do.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from capd.errors import CapdError, ConfigError, NoSuchSeries
from capd.store.alerts.alert import Alert
from capd.store.catalog.rows import SeriesRow, SessionRow
from capd.store.catalog.totals import Held, held_by
from capd.store.documents.gradient_names import answers
from capd.store.documents.tombstone import RemovedSeries, Tombstone, removed_series
from capd.store.keeps.file import distinct_keeps
from capd.store.keeps.keep import Keep
from capd.store.logical.grouping import logical_series
from capd.store.logical.ranks import KnownRanks
from capd.store.logical.series import LogicalSeries
from capd.store.objects.address import Address, RunPlace, place_of
from capd.store.read.elements import ReadTools
from capd.store.read.notebook import store_html
from capd.store.read.rows import NewestAttempts
from capd.store.read.scalars import Scalar, ScalarRows, read_scalar, scalar_rows
from capd.store.read.series import Record, Series, import_extra
from capd.store.read.source import RunNode, source_of
from capd.store.remote.run import remote_runs
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.reference import parse_reference

__all__ = [
    "Record",
    "Scalar",
    "Series",
    "SeriesList",
    "SeriesListing",
    "Store",
    "Totals",
    "list_series",
    "open_store",
    "runs",
    "runs_at",
]

_KEY_FIELDS = frozenset(Key.__struct_fields__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals(Held):
    """The counters of a run over all ranks and nodes. clean: no kill cut off the counters of a session."""

    offered: int
    committed: int
    in_flight: int
    dropped: dict[str, int]
    clean: bool


class SeriesListing(Key, frozen=True, kw_only=True):
    """One line of `capd ls`: the key and totals. shape: [records, *largest record shape]. kept: as `Series.kept`."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    records: int
    raw_bytes: int
    stored_bytes: int
    kept: str


class Store:
    """One run, read-only. It shows a snapshot, which `refresh()` updates.

    `series` and `find` have the tensors, `scalars` and `scalar` the single numbers recorded beside them. `removed`
    names the series that `capd rm --series` removed.
    """

    def __init__(self, path: RunPlace) -> None:
        """Open a run directory, or a run in an object store. Raises NotAStore if it is not one."""
        self.path = path
        self._source = source_of(path)
        self._tools = ReadTools()
        self._nodes: list[RunNode] = []
        self._scalar_rows: dict[tuple[str, int], ScalarRows] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Read the catalogs and spools, or the manifests again. If a file only grew, only its new part is read."""
        self._nodes = list(self._source.nodes())
        attributes = self._source.attributes()
        self.run_id: str = attributes.get("run_id", self.path.stem)
        self.removed: list[RemovedSeries] = removed_series(attributes)
        # A kill interrupted their removal: some of their files may be gone.
        half = removed_series(attributes, "removing")
        for path in (path for gone in half for path in gone.paths):
            for node in self._nodes:
                node.series.pop(path, None)
        self.removed += half
        self._scalar_rows = None

    @property
    def nodes(self) -> list[RunNode]:
        """The views of the nodes that wrote the run."""
        return list(self._nodes)

    def __repr__(self) -> str:
        return f"<Store {self.path} with {len(self.series)} series>"

    def _repr_html_(self) -> str:
        return store_html(f"Run {self.path}", self.series)

    @property
    def series(self) -> list[Series]:
        """All series of tensors with at least one record, all attempts, ordered by path."""
        return self._pick(lambda _: True, "all")

    def _pick(
        self, wanted: Callable[[Key], bool], attempt: int | str, *, everything: bool = False
    ) -> list[Series]:
        if not (isinstance(attempt, int) or attempt in ("latest", "all")):
            raise ConfigError(f"attempt {attempt!r} is not a number, 'latest' or 'all'")
        # No record need be read for it.
        if attempt == "latest" and all(node.has_one_attempt for node in self._nodes):
            attempt = "all"
        found = []
        of_key: dict[Key, list[tuple[RunNode, SeriesRow]]] = {}
        for node in self._nodes:
            within = node.with_attempt(attempt) if isinstance(attempt, int) else node.series.keys()
            for path, row in node.series.items():
                if row.records and wanted(row.header.key) and (everything or row.holds_tensors):
                    of_key.setdefault(row.header.key, []).append((node, row))
                    if path in within:
                        found.append((path, node, row))
        found.sort(key=lambda item: item[0])
        newest = {key: NewestAttempts(group) for key, group in of_key.items() if len(group) > 1}
        series = [
            Series(node, row, self._tools, attempt, newest.get(row.header.key)) for _, node, row in found
        ]
        if attempt == "latest":
            # A later attempt may have replaced all records of a series.
            return [one for one in series if one.header.key not in newest or len(one)]
        return series

    def everything(self, attempt: int | str = "all") -> list[Series]:
        """Return all series with at least one record: of tensors, scalars and errors. attempt: as in `find`."""
        return self._pick(lambda _: True, attempt, everything=True)

    def find(self, *, path: str | None = None, attempt: int | str = "latest", **key: Any) -> SeriesList:
        """Return the series that match a key, with tensors or only statistics (`Series.kept`).

        Args:
            path: A glob of series paths, such as "*.q_proj.forward.input".
            attempt: "latest" keeps the record of the latest attempt among records at the same moment. A number keeps
                the records of that attempt. "all" keeps everything.
            **key: Values of key fields; a text with `*` or `?` is a glob. A list of values accepts any of them. A
                tensor_name of "grad_output" also finds the `input` of a backward, because tensor_saver gave that
                gradient this name.

        Raises:
            ConfigError: `attempt` is none of these.
            CapdError: A name is not a key field.
        """
        tests = _tests(key)
        found = self._pick(lambda key: all(test(key) for test in tests), attempt)
        return SeriesList(
            series
            for series in found
            if (path is None or fnmatchcase(series.path, path))
            and (not isinstance(attempt, int) or len(series))
        )

    def logical(
        self, *, path: str | None = None, attempt: int | str = "latest", **key: Any
    ) -> list[LogicalSeries]:
        """Return the whole tensors of which the matching series hold parts (docs/logical.md). Reads no element.

        The parts of all ranks belong to a tensor, although only one of them matches. A tensor also matches by its own
        key, in which an expert has its number over all ranks.

        Args:
            path: As in `find`.
            attempt: As in `find`.
            **key: As in `find`.

        Raises:
            ContradictoryParts: The attributes of a matching series are not what docs/logical.md says.
            ConfigError: As `find`.
            CapdError: As `find`.
        """
        tests = _tests(key)
        # A tensor that keeps only statistics on one rank is named when it is joined.
        return logical_series(
            self.find(attempt=attempt),
            self._known_ranks,
            lambda one, where: (
                all(test(one) for test in tests) and (path is None or fnmatchcase(where, path))
            ),
        )

    @property
    def _known_ranks(self) -> KnownRanks:
        return KnownRanks(
            (
                (row.header.key.rank, node.name, row.header.attributes)
                for node in self._nodes
                for row in node.series.values()
            ),
            ((row.rank, node, row.world_size) for node, row in self.sessions_by_node()),
        )

    def __getitem__(self, path: str) -> Any:
        """Return the Series of this path, or the SeriesList of a glob such as "*.q_proj.forward.input".

        Raises:
            NoSuchSeries: No series has this path. The message says if it was removed, or names similar ones.
            ConfigError: It is no text.
        """
        if not isinstance(path, str):
            raise ConfigError(
                f"a store is indexed by a path or a glob, not by {type(path).__name__}; `store.series` is a list"
            )
        found = self.find(path=path)
        if is_glob(path):
            return found
        if not found:
            if (mark := self.removal_of(path)) is not None:
                raise NoSuchSeries(f"series {path} of {self.path} was {mark}")
            paths = [series.path for series in self.series]
            if path in paths:
                raise NoSuchSeries(
                    f"series {path} of {self.path} has only records that later attempts replaced; "
                    f'`find(path=..., attempt="all")` has them'
                )
            raise NoSuchSeries(f"{self.path} has no series {path!r}{_similar(path, paths)}")
        return found[0]

    def removal_of(self, path: str) -> Tombstone | None:
        """Return when and by whom the series of a path, or of the end of one, or of a glob was removed, at last.

        Returns:
            None if none of them was.
        """
        found = [
            gone.mark
            for gone in self.removed
            if any(path == one or one.endswith(f"/{path}") or fnmatchcase(one, path) for one in gone.paths)
        ]
        return found[-1] if found else None

    def __contains__(self, path: object) -> bool:
        """Return whether a series of tensors has this path."""
        return any(series.path == path for series in self.series)

    def __iter__(self) -> Iterator[Series]:
        return iter(self.find())

    def record(self, reference: str) -> tuple[Series, int]:
        """Return a record's series and its index there, for a reference that `capd_client.tensor_saver` returned.

        Raises:
            ConfigError: The text is not a reference.
            CapdError: This run has no such record.
        """
        key, moment = parse_reference(reference)
        for series in self.find(attempt=moment["attempt"], **key):
            for index, record in enumerate(series.records):
                if all(getattr(record, name) == value for name, value in moment.items()):
                    return series, index
        raise CapdError(f"{self.path} has no record {reference}; it was dropped, or belongs to another run")

    @property
    def _scalars(self) -> dict[tuple[str, int], ScalarRows]:
        """The series of each scalar by its name and rank."""
        if self._scalar_rows is None:
            self._scalar_rows = scalar_rows(self._nodes)
        return self._scalar_rows

    def scalars(self) -> dict[str, list[int]]:
        """Return the names of all scalars in order, each with the ranks that recorded it."""
        found: dict[str, list[int]] = {}
        for name, rank in self._scalars:
            found.setdefault(name, []).append(rank)
        return found

    def scalar(self, name: str, *, rank: int | None = None, attempt: int | str = "latest") -> Scalar:
        """Return what one rank recorded under a name.

        Args:
            name: The name, as in "loss".
            rank: The rank. None: the first one that has the scalar.
            attempt: As in `find`.

        Raises:
            NoSuchSeries: The run has no such scalar of this rank. The message names those that there are.
            DamagedRecord: A value cannot be read exactly.
        """
        found = self._scalars
        first = rank if rank is not None else next((at[1] for at in found if at[0] == name), 0)
        rows = found.get((name, first))
        if rows is None:
            whose = "" if rank is None else f" of rank {rank}"
            raise NoSuchSeries(f"{self.path} has no scalar {name!r}{whose}; it has {self._instead(name)}")
        return read_scalar(rows, self._tools, attempt)

    def _instead(self, name: str) -> str:
        known = self.scalars()
        if name in known:
            return f"rank {', '.join(map(str, known[name]))}"
        return ", ".join(known) or "no scalar at all"

    @property
    def alerts(self) -> list[Alert]:
        """What rules said while the run was captured, in order of time. Damaged lines are left out.

        Raises:
            StoreError: They cannot be read.
            OSError: They cannot be read.
        """
        return sorted((one for node in self._nodes for one in node.alerts), key=lambda one: one.time_ns)

    def alerts_by_node(self) -> dict[str, list[Alert]]:
        """Return the same alerts, in order, by the name of their node."""
        return {node.name: node.alerts for node in self._nodes}

    @property
    def keeps(self) -> list[Keep]:
        """What the flight recorder kept, and why, in order of time. Damaged lines are left out.

        Raises:
            StoreError: They cannot be read.
            OSError: They cannot be read.
        """
        return distinct_keeps(one for node in self._nodes for one in node.keeps)

    def keeps_by_node(self) -> dict[str, list[Keep]]:
        """Return the keeps, in order, by the name of the node whose file has them."""
        return {node.name: node.keeps for node in self._nodes}

    @property
    def sessions(self) -> list[SessionRow]:
        """The last persisted counters of every rank's session."""
        return [row for node in self._nodes for row in node.sessions]

    def sessions_by_node(self) -> Iterator[tuple[str, SessionRow]]:
        """Yield the same counters, each with the name of its node."""
        for node in self._nodes:
            for row in node.sessions:
                yield node.name, row

    def totals(self) -> Totals:
        """Return the counters of the run. Records are counted in the store; the rest sums the sessions.

        Records of removed series count as committed.
        """
        held = held_by(row for node in self._nodes for row in node.series.values())
        sessions = self.sessions
        dropped = dict(sum((Counter(session.dropped) for session in sessions), Counter()))
        # Records of removed series were committed, too.
        committed = held.records + sum(gone.records for gone in self.removed)
        return Totals(
            offered=max(sum(s.offered for s in sessions), committed + sum(dropped.values())),
            committed=committed,
            in_flight=sum(s.in_flight for s in sessions),
            dropped=dropped,
            **asdict(held),
            clean=all(session.clean for session in sessions),
        )

    def to_pandas(self, *, attempt: int | str = "latest") -> Any:
        """Return a DataFrame with one row per record: path, key, kept, moment, shape and statistics.

        Args:
            attempt: As in `find`.

        Raises:
            CapdError: The extra `table` is not installed.
        """
        pd = import_extra("pandas", "table")
        with contextlib.ExitStack() as stack:
            for node in self._nodes:
                stack.enter_context(node.connected())
            return pd.DataFrame([row for series in self.find(attempt=attempt) for row in _flat(series)])


class SeriesList(list[Series]):
    """The series that a selection found. Notebooks show it as a table."""

    def _repr_html_(self) -> str:
        return store_html("Series", self)


def is_glob(text: str) -> bool:
    """Return whether a text selects by `*` or `?`."""
    return "*" in text or "?" in text


def _tests(key: Mapping[str, Any]) -> list[Callable[[Key], bool]]:
    if unknown := key.keys() - _KEY_FIELDS:
        known = ", ".join(("path", *Key.__struct_fields__))
        raise CapdError(f"unknown key field {min(unknown)!r}; known: {known}")
    return [_test(name, value) for name, value in key.items()]


def _test(field: str, value: Any) -> Callable[[Key], bool]:
    values = list(value) if isinstance(value, (list, tuple, set)) else [value]
    globs = [one for one in values if isinstance(one, str) and is_glob(one)]
    return lambda key: (
        answers(key, field, values) or any(fnmatchcase(str(getattr(key, field)), glob) for glob in globs)
    )


def _similar(path: str, paths: Sequence[str]) -> str:
    close = get_close_matches(path, paths, 3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _flat(series: Series) -> Iterator[dict[str, Any]]:
    key = msgspec.structs.asdict(series.key)
    for record in series.records:
        stats = record.stats
        yield {
            "path": series.path,
            **key,
            "dtype": series.dtype,
            "kept": series.kept,
            "record": record.index,
            **{name: getattr(record, name) for name in Moment.__struct_fields__},
            "shape": record.shape,
            "device": record.device,
            **{name: getattr(stats, name) for name in _STATISTICS},
        }


_STATISTICS = (
    "count", "nan", "inf", "zero", "min", "max", "absmax", "mean", "std", "kurtosis", "crest", "sum",
    "sum_sq", "sum_cube", "sum_fourth",
)  # fmt: skip


def open_store(place: str | os.PathLike[str] | Address) -> Store:
    """Open a run directory, or a run in an object store, such as s3://bucket/runs/exp7.zarr.

    Raises:
        NotAStore: There is no run.
        ConfigError: It is an address that is not valid.
    """
    return Store(place_of(place))


def runs_at(place: RunPlace) -> Sequence[RunPlace]:
    """Return the runs of a store root, or below a prefix of an object store, oldest first."""
    return [run.place for run in remote_runs(place)] if isinstance(place, Address) else runs(place)


def runs(root: str | Path) -> Sequence[Path]:
    """Return the run directories of a store root, oldest first (by modification of their metadata)."""
    found = [path.parent for path in Path(root).glob("*.zarr/zarr.json")]
    return sorted(found, key=lambda run: ((run / "zarr.json").stat().st_mtime_ns, run.name))


def list_series(store: Store, attempt: int | str = "all") -> list[SeriesListing]:
    """Return all series of tensors of a run with their totals. Reads no record of a run with one attempt."""
    return [
        SeriesListing(
            path=series.path,
            **msgspec.structs.asdict(series.key),
            dtype=series.dtype,
            shape=series.shape,
            records=len(series),
            raw_bytes=series.raw_bytes,
            stored_bytes=series.stored_bytes,
            kept=series.kept,
        )
        for series in store.find(attempt=attempt)
    ]
