"""Columns of bytes from a Parquet file that may come from anybody: a small file must not become much memory.

A page with one long value and a count of a million is a few bytes. So the column is read as a dictionary, and its bytes
are counted before they are copied.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MAX_COLUMN_NBYTES", "bytes_of", "check_lengths"]

MAX_COLUMN_NBYTES = 1 << 30
# Numbers, in one column of one row group.
_MAX_VALUES = 1 << 26


def check_lengths(metadata: Any) -> None:
    """Check that no column of a Parquet file claims more values than any segment has.

    Raises:
        ValueError: One does.
    """
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for at in range(group.num_columns):
            column = group.column(at)
            if (
                not 0 <= column.num_values <= _MAX_VALUES
                or column.total_uncompressed_size > MAX_COLUMN_NBYTES
            ):
                raise ValueError(f"a column claims {column.num_values} values")


def bytes_of(column: Any) -> list[Any]:
    """Return the values of a column that was read with `read_dictionary`.

    Raises:
        ValueError: They are longer than a segment's.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    total = 0
    for chunk in column.chunks:
        lengths = pc.binary_length(chunk.dictionary if isinstance(chunk.type, pa.DictionaryType) else chunk)
        if isinstance(chunk.type, pa.DictionaryType):
            lengths = lengths.take(chunk.indices)
        total += pc.sum(lengths).as_py() or 0
    if total > MAX_COLUMN_NBYTES:
        raise ValueError(f"its values have {total} bytes")
    found: list[Any] = column.to_pylist()
    return found
