"""The `moments` array of a long series, read back. Only an array that matches this format is accepted."""

from __future__ import annotations

from itertools import chain as joined
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capd.errors import DamagedRecord
from capd.store.documents.json_document import is_length, read_document
from capd.store.documents.zarr_json import array_differences, table_document
from capd.store.format.codecs import chain_for
from capd.store.format.columns import TABLE_ROWS
from capd.store.format.decode import decode
from capd_client.protocol.key import MAX_NDIM, Moment

__all__ = ["MomentsTable"]

_FIELDS = list(Moment.__struct_fields__)
_MAX_CHUNK_NBYTES = 1 << 20


class MomentsTable:
    """The rows [moment fields, shape] of records 0 ≤ i < count.

    Attributes:
        count: The number of rows.
        ndim: The number of axes of the shapes.
    """

    def __init__(self, place: Path) -> None:
        """Open the array in the directory `place`.

        Raises:
            DamagedRecord: The array is missing or differs from `capd.store.documents.zarr_json.table_files`.
            NotAStore: The document is not a JSON object.
            OSError: The document cannot be read.
        """
        document = read_document(place / "zarr.json")
        if document is None:
            raise DamagedRecord("the `moments` array is missing")
        self._place = place
        self.count, self.ndim = _layout(document)
        held = sum(1 for _ in (place / "c").glob("*/0")) * TABLE_ROWS
        if self.count > held:
            raise DamagedRecord(f"the `moments` array claims {self.count} rows, but holds at most {held}")

    def rows(self, first: int, last: int) -> list[list[int]]:
        """Return the existing rows in first ≤ i < last. Raises DamagedRecord."""
        last = min(last, self.count)
        if first >= last:
            return []
        chunks = range(first // TABLE_ROWS, (last - 1) // TABLE_ROWS + 1)
        found = list(joined.from_iterable(self._chunk(number).tolist() for number in chunks))
        begin = chunks[0] * TABLE_ROWS
        return found[first - begin : last - begin]

    def _chunk(self, number: int) -> NDArray[np.generic]:
        path = self._place / "c" / str(number) / "0"
        if not path.is_file() or path.stat().st_size > _MAX_CHUNK_NBYTES:
            raise DamagedRecord(f"chunk {number} of the `moments` array is missing or too large")
        shape = (TABLE_ROWS, len(_FIELDS) + self.ndim)
        return decode(chain_for("zstd:1", "int64"), path.read_bytes(), shape)


def _layout(document: dict[str, Any]) -> tuple[int, int]:
    """Return the number of rows and of the shapes' axes from an array's document. Raises DamagedRecord."""
    try:
        rows, width = document["shape"]
        ndim = width - len(_FIELDS)
        if not is_length(rows) or not 0 <= ndim <= MAX_NDIM:
            raise DamagedRecord(f"the `moments` array has the shape {document['shape']}")
        expected = table_document(ndim)
        is_ours = document["attributes"]["columns"] == expected["attributes"]["columns"]
        problem = next(array_differences(document, expected), None if is_ours else "it has other columns")
    except (LookupError, TypeError, ValueError) as error:
        raise DamagedRecord(f"the metadata of the `moments` array is not valid: {error!r}") from error
    if problem is not None:
        raise DamagedRecord(f"the `moments` array differs from the one that capd writes: {problem}")
    return rows, ndim
