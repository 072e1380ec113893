"""What a series shows to plain Zarr readers: the shape of its array, and the moments and shapes of its records.

Read to check it against the frames, and to know a record whose COMMIT is lost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capd.errors import DamagedRecord, NotAStore
from capd.store.documents import read_group
from capd_client.key import Moment

__all__ = ["Published", "read_array", "read_published"]

_MOMENT = Moment.__struct_fields__


class Published:
    """Moments and shapes of records 0 ≤ i < count; node: who wrote them; document: the group's. Made by
    `read_published`."""

    def __init__(self, document: dict[str, Any], table: Any) -> None:
        capd = document["attributes"]["capd"]
        columns = capd["records"]
        self.count = int(columns["count"])
        self.node = str(capd.get("node", ""))
        self.document = document
        self._columns, self._table = columns, table

    def rows(self, first: int, last: int) -> Sequence[tuple[Moment, tuple[int, ...]]]:
        """Moment and shape of records first ≤ i < last. Raises DamagedRecord where they cannot be read."""
        last = min(last, self.count)
        try:
            if self._table is None:
                return [self._inline(number) for number in range(first, last)]
            return self._from_table(first, last)
        except Exception as error:  # zarr raises what its codecs and stores raise
            raise DamagedRecord(f"the published moments cannot be read: {error}") from error

    def _inline(self, number: int) -> tuple[Moment, tuple[int, ...]]:
        def value(name: str) -> Any:
            column = self._columns[name]
            return column[number] if isinstance(column, list) else column

        shape = self._columns["shape"]
        varies = bool(shape) and isinstance(shape[0], list)
        return (
            Moment(**{name: value(name) for name in _MOMENT}),
            tuple(int(n) for n in (shape[number] if varies else shape)),
        )

    def _from_table(self, first: int, last: int) -> Sequence[tuple[Moment, tuple[int, ...]]]:
        names = list(self._table.attrs["columns"])
        at = [names.index(name) for name in _MOMENT]
        axes = [position for position, name in enumerate(names) if name.startswith("shape_")]
        found = []
        for row in self._table[first:last].tolist():
            moment: dict[str, Any] = {
                name: None if row[i] == -1 and name in _OPTIONAL else row[i]
                for name, i in zip(_MOMENT, at, strict=True)
            }
            moment["recompute"] = bool(moment["recompute"])
            found.append((Moment(**moment), tuple(row[i] for i in axes)))
        return found


_OPTIONAL = frozenset(
    name for name, default in zip(_MOMENT, Moment.__struct_defaults__, strict=True) if default is None
)


def read_published(series: Path) -> Published:
    """The columns of the series group at `series`; raises DamagedRecord if its zarr.json is missing or damaged."""
    try:
        document = read_group(series)
        if document is None:
            raise DamagedRecord("zarr.json of the series is missing")
        table = None
        if "array" in document["attributes"]["capd"]["records"]:
            import zarr

            table = zarr.open_array(series / "moments", mode="r")
        return Published(document, table)
    except DamagedRecord:
        raise
    except (NotAStore, OSError, LookupError, TypeError, ValueError) as error:
        raise DamagedRecord(f"the series' metadata cannot be read: {error}") from error


def read_array(series: Path) -> dict[str, Any]:
    """The array document of the series at `series`; raises DamagedRecord if it is missing or damaged."""
    try:
        document = json.loads((series / "data" / "zarr.json").read_bytes())
        if not isinstance(document, dict) or not all(isinstance(n, int) for n in document["shape"]):
            raise DamagedRecord("data/zarr.json is not the metadata of an array")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DamagedRecord(f"data/zarr.json cannot be read: {error}") from error
    return document
