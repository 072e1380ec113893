"""The index of a sealed shard: the place of each inner chunk, as the Zarr sharding codec defines it.

The index ends the file. It holds offset and length of each chunk as little-endian u64, and then the crc32c of these
entries. Both numbers are 2^64-1 for an empty chunk.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from capd.errors import DamagedRecord
from capd.store.format.codecs import crc32c

__all__ = [
    "EMPTY",
    "chunk_places",
    "entries_in",
    "index_bytes",
    "index_entries",
    "index_nbytes",
    "read_index",
]

EMPTY = 2**64 - 1


def index_nbytes(slots: int) -> int:
    """Return the bytes of an index with `slots` entries."""
    return 16 * slots + 4


def index_bytes(index: Mapping[int, tuple[int, int]], slots: int) -> bytes:
    """Return the encoded index of chunks (entry → offset, bytes). The entries that `index` lacks are empty."""
    entries = np.full((slots, 2), EMPTY, dtype="<u8")
    for slot, place in index.items():
        entries[slot] = place
    body = entries.tobytes()
    return body + struct.pack("<I", crc32c(body))


def index_entries(fd: int, slots: int) -> NDArray[np.uint64] | None:
    """Return the entries [slots, 2] at the end of a file; None if they are missing or fail their checksum."""
    nbytes, size = index_nbytes(slots), os.fstat(fd).st_size
    return entries_in(os.pread(fd, nbytes, size - nbytes) if size >= nbytes else b"", slots)


def entries_in(body: bytes, slots: int) -> NDArray[np.uint64] | None:
    """Return the entries [slots, 2] in the last bytes of a shard; None if they fail their checksum."""
    if len(body) != index_nbytes(slots) or struct.unpack("<I", body[-4:])[0] != crc32c(body[:-4]):
        return None
    return np.frombuffer(body, dtype="<u8", count=2 * slots).reshape(slots, 2)


def chunk_places(
    entries: NDArray[np.uint64] | None,
    journal: Mapping[int, tuple[int, int]],
    slots: Mapping[int, int],
    nbytes: int,
) -> dict[int, tuple[int, int]]:
    """Return the places of chunks in a sealed shard, by ordinal. A chunk that is not in the shard is missing.

    Args:
        entries: The entries of the index; None if it is lost, and `journal` replaces it.
        journal: The places that COMMIT frames name, by entry.
        slots: The entries of the chunks, by ordinal.
        nbytes: The size of the shard.

    Raises:
        DamagedRecord: A place is outside of the shard.
    """
    found: dict[int, tuple[int, int]] = {}
    for ordinal, slot in slots.items():
        if entries is None:
            place = journal.get(slot)
        else:
            offset, length = entries[slot].tolist()
            place = None if offset == EMPTY else (offset, length)
        if place is not None:
            if sum(place) > nbytes:
                raise DamagedRecord(f"index entry {slot} points beyond the end of the shard")
            found[ordinal] = place
    return found


def read_index(fd: int, slots: int) -> dict[int, tuple[int, int]]:
    """Return the entries in use: entry → (offset, bytes).

    Raises:
        DamagedRecord: The index is missing or its checksum is wrong.
    """
    entries = index_entries(fd, slots)
    if entries is None:
        raise DamagedRecord("the shard's index is missing or fails its checksum")
    used = np.flatnonzero(entries[:, 0] != EMPTY)
    return {int(slot): (int(entries[slot, 0]), int(entries[slot, 1])) for slot in used}
