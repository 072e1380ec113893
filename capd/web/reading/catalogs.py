"""The runs of the page, and the catalogs of one run: every answer reads a bounded number of rows, and no element.

A catalog is opened for one answer and closed again: a daemon that ends waits for no reader. Nothing here grows with the
number of series.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from capd.errors import CapdError, NoSuchSeries, NotAStore, StoreError
from capd.lifecycle.inventory import run_paths
from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.place import live_catalog
from capd.store.catalog.rows import CATALOG_NAME, SeriesRow, read_every, read_series
from capd.store.catalog.search import (
    FIELDS,
    count_series,
    distinct_values,
    find_errors,
    find_scalars,
    find_series,
)
from capd.store.disk.layout import node_directory, nodes_of
from capd.store.documents.headers import sound_row
from capd.store.documents.zarr_json import run_attributes
from capd.store.format.frames import RecordRow

__all__ = ["Found", "RunCatalogs", "Runs", "SeriesPlace"]

_SUFFIX = ".zarr"
_MOST_VALUES = 500
# Series of one key differ in what is said of them, as in the lab's sample.
_MOST_ERROR_SERIES = 16
_MOST_OFFSET = 1_000_000
_DAMAGE = (sqlite3.DatabaseError, ValueError, TypeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True)
class SeriesPlace:
    """One series of one node."""

    node: str
    row: SeriesRow


@dataclass(frozen=True, slots=True)
class Found:
    """One page of a search. total: all that match."""

    places: Sequence[SeriesPlace]
    total: int


class Runs:
    """The runs below a directory, or the one run that STORE names."""

    def __init__(self, store: Path) -> None:
        """Show a directory of runs, or one run. Nothing is read yet."""
        self._one = store if store.suffix == _SUFFIX or (store / "zarr.json").is_file() else None
        self.root = store if self._one is None else store.parent

    def paths(self) -> list[Path]:
        """Return the runs, the oldest first."""
        return run_paths(self.root) if self._one is None else [self._one]

    def run(self, name: str) -> RunCatalogs:
        """Return the catalogs of a run.

        Raises:
            NotAStore: There is no run of this name, or it cannot be read.
        """
        # A name comes from a browser, and no part of it may lead out of the directory.
        if not name or "/" in name or "\0" in name or name.startswith("."):
            raise NotAStore(f"{name!r} is no name of a run")
        path = self.root / f"{name}{_SUFFIX}"
        if self._one is not None:
            if name != self._one.name.removesuffix(_SUFFIX):
                raise NotAStore(f"this page only shows the run {self._one.name}")
            path = self._one
        # A foreign directory is not searched for catalogs.
        run_attributes(path)
        return RunCatalogs(path)


class RunCatalogs:
    """The catalogs of one run: one for each node that wrote it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nodes = nodes_of(path)

    def search(self, words: Sequence[str], fields: Mapping[str, str | int], first: int, most: int) -> Found:
        """Return one page of the series of tensors that match, in the order of their paths.

        Raises:
            StoreError: A catalog cannot be read.
        """
        first = min(first, _MOST_OFFSET)
        found: list[SeriesPlace] = []
        total, several = 0, len(self.nodes) > 1
        for node, db in self._opened():
            total += count_series(db, words, fields)
            # Of several nodes, each might have the whole page.
            skipped, wanted = (0, first + most) if several else (first, most)
            found += [
                SeriesPlace(node, row) for row in find_series(db, words, fields, first=skipped, most=wanted)
            ]
        if several:
            found = sorted(found, key=lambda one: one.row.header.path)[first : first + most]
        return Found(found, total)

    def of_layers(
        self, words: Sequence[str], fields: Mapping[str, str | int], most: int
    ) -> list[SeriesPlace]:
        """Return the series of tensors that match and have a layer, by layer; `most` of them at most."""
        found = [
            SeriesPlace(node, row)
            for node, db in self._opened()
            for row in find_series(db, words, fields, order="layer", most=most)
        ]
        return sorted((one for one in found if one.row.header.key.layer is not None), key=_layer)[:most]

    def values(self) -> dict[str, list[str | int | None]]:
        """Return the values of each key field among the tensors, `_MOST_VALUES` of each at most."""
        found: dict[str, set[str | int | None]] = {field: set() for field in FIELDS}
        for _, db in self._opened():
            for field, values in found.items():
                values.update(distinct_values(db, field, _MOST_VALUES))
        return {
            field: sorted(values, key=lambda one: (one is None, one))[:_MOST_VALUES]
            for field, values in found.items()
        }

    def series(self, path: str) -> list[SeriesPlace]:
        """Return the series at a path: one for each node that wrote records of it.

        Raises:
            NoSuchSeries: There is none.
            StoreError: A catalog cannot be read.
        """
        found = [
            SeriesPlace(node, row)
            for node, db in self._opened()
            for row in read_series(db, path)
            if row.records and not row.holds_errors
        ]
        if not found:
            raise NoSuchSeries(f"{self.path.name} has no series {path!r}, or none with records yet")
        return found

    def errors(self, places: Sequence[SeriesPlace]) -> list[SeriesPlace]:
        """Return the series with the errors of formats that were measured on some series while capturing."""
        found = []
        for place in places:
            with self._reading(place.node) as db:
                found += [
                    SeriesPlace(place.node, row)
                    for row in find_errors(db, place.row.header, _MOST_ERROR_SERIES)
                ]
        return found

    def scalars(self, name: str | None, most: int) -> list[SeriesPlace]:
        """Return the series of scalars, or of the one scalar `name`; `most` of them at most."""
        return [
            SeriesPlace(node, row) for node, db in self._opened() for row in _scalar_series(db, name, most)
        ][:most]

    def rows(
        self, places: Sequence[SeriesPlace], step: int, most: int
    ) -> Iterator[tuple[SeriesPlace, list[RecordRow]]]:
        """Yield every `step`-th record of some series, `most` of each at most.

        Raises:
            StoreError: A catalog cannot be read.
        """
        for node in dict.fromkeys(place.node for place in places):
            with self._reading(node) as db:
                for place in places:
                    if place.node == node:
                        header, found = place.row.header, read_every(db, place.row.id, step, most)
                        yield place, [sound_row(row, header) for _, row in found]

    def _opened(self) -> Iterator[tuple[str, sqlite3.Connection]]:
        for node in self.nodes:
            with self._reading(node) as db:
                yield node, db

    @contextlib.contextmanager
    def _reading(self, node: str) -> Iterator[sqlite3.Connection]:
        directory = node_directory(self.path, node)
        live = live_catalog(directory)
        # On a network file system, another machine sees only the published snapshot.
        catalog = live if live.exists() else directory / CATALOG_NAME
        try:
            with contextlib.closing(connect_read_only(catalog)) as db:
                yield db
        except CapdError:
            raise
        except _DAMAGE as error:
            raise StoreError(
                f"the catalog {catalog} cannot be read: {error}; start `capd serve` on the store to rebuild it"
            ) from error


def _scalar_series(db: sqlite3.Connection, name: str | None, most: int) -> list[SeriesRow]:
    found = find_scalars(db, name, most)
    return [row for row in found if row.holds_scalars]


def _layer(place: SeriesPlace) -> tuple[int, str]:
    key = place.row.header.key
    return -1 if key.layer is None else key.layer, place.row.header.path
