"""The codec chain of a series: how an inner chunk becomes bytes and back, and the chain's entry in zarr.json.

zarr-python, tensorstore and zarrs can decode all of these codecs. crc32c always follows. A series' header holds the
explicit name of the codec (`none`, `zstd:1`, `blosc:zstd:1:shuffle:1048576`), never the name of a preset. A store
therefore keeps its meaning when the presets change.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import google_crc32c
import numcodecs.blosc
import numpy as np
from numcodecs import Blosc, Zstd
from numpy.typing import NDArray

from capd.errors import ConfigError
from capd.store.format.dtypes import stored_type

__all__ = ["Chain", "Encoded", "chain_for", "codec_of", "crc32c", "parse_codec"]

# The pool encodes chunks in parallel. Blosc's own threads would only compete with it.
numcodecs.blosc.use_threads = False

_SHUFFLES = {"noshuffle": Blosc.NOSHUFFLE, "shuffle": Blosc.SHUFFLE, "bitshuffle": Blosc.BITSHUFFLE}
_BLOSC_LEVELS, _ZSTD_LEVELS = range(10), range(-7, 23)
_MAX_BLOCK_NBYTES = 64 << 20
_FORMS = "none, zstd:LEVEL, or blosc:lz4|zstd:LEVEL:shuffle|bitshuffle|noshuffle[:BLOCK_BYTES]"


# CRC-32C (Castagnoli) of a payload. It releases the GIL for `bytes` only. It has no wrapper, because each small
# record calls it three times.
crc32c: Callable[[bytes], int] = google_crc32c.value


class Encoded(NamedTuple):
    """An encoded chunk: its body and its checksum. They are separate, because joining them would copy the body."""

    body: bytes
    crc: int

    @classmethod
    def of(cls, payload: bytes) -> Encoded:
        """Split the stored payload of a chunk into body and checksum."""
        return cls(payload[:-4], int.from_bytes(payload[-4:], "little"))

    @property
    def nbytes(self) -> int:
        """The bytes in the file, including the checksum."""
        return len(self.body) + 4

    @property
    def parts(self) -> tuple[bytes, bytes]:
        """The bytes in the file: the body, and its crc32c as four little-endian bytes."""
        return self.body, struct.pack("<I", self.crc)


@dataclass(frozen=True, slots=True)
class Chain:
    """The codec chain of one stored dtype: bytes → [compressor] → crc32c. `capd.store.format.decode` reverses it.

    Attributes:
        name: The explicit name of the compressor.
        stored: The numpy dtype of the Zarr array.
        compressor: A numcodecs codec, or None.
    """

    name: str
    stored: np.dtype[np.generic]
    compressor: Any

    def encode(self, chunk: NDArray[np.generic]) -> Encoded:
        """Encode a C-contiguous chunk of the stored dtype."""
        body: bytes = chunk.tobytes() if self.compressor is None else self.compressor.encode(chunk)
        return Encoded(body, crc32c(body))

    def zarr_codecs(self) -> list[dict[str, Any]]:
        """Return the bytes-to-bytes codecs as JSON values, for the array's metadata."""
        codecs: list[dict[str, Any]] = [{"name": "crc32c"}]
        found = self.compressor
        if isinstance(found, Zstd):
            codecs.insert(0, {"name": "zstd", "configuration": {"level": found.level, "checksum": False}})
        elif found is not None:
            [shuffle] = [name for name, number in _SHUFFLES.items() if number == found.shuffle]
            sizes = {"typesize": self.stored.itemsize, "blocksize": found.blocksize}
            blosc = {"cname": found.cname, "clevel": found.clevel, "shuffle": shuffle, **sizes}
            codecs.insert(0, {"name": "blosc", "configuration": blosc})
        return codecs


@cache
def chain_for(codec: str, dtype: str) -> Chain:
    """Return the chain of an explicit codec name for a dtype name.

    Raises:
        ConfigError: The codec name is unknown.
        StoreError: The dtype name is unknown.
    """
    return Chain(codec, stored_type(dtype).stored, parse_codec(codec))


def parse_codec(codec: str) -> Any:
    """Return the compressor of an explicit codec name; None for `none`.

    Raises:
        ConfigError: The name is unknown. The message lists the possible forms.
    """
    kind, *parts = codec.split(":")
    try:
        if kind == "none" and not parts:
            return None
        if kind == "zstd" and len(parts) == 1 and int(parts[0]) in _ZSTD_LEVELS:
            return Zstd(level=int(parts[0]))
        if kind == "blosc" and len(parts) in (3, 4):
            cname, level, shuffle = parts[0], int(parts[1]), _SHUFFLES[parts[2]]
            block_nbytes = int(parts[3]) if len(parts) == 4 else 0
            if (
                cname in ("lz4", "zstd")
                and level in _BLOSC_LEVELS
                and block_nbytes in range(_MAX_BLOCK_NBYTES + 1)
            ):
                return Blosc(cname=cname, clevel=level, shuffle=shuffle, blocksize=block_nbytes)
    except (ValueError, KeyError):
        pass
    raise ConfigError(
        f"unknown codec {codec!r}; choose auto, default, fast, or an explicit one: {_FORMS} "
        f"(levels: zstd {_ZSTD_LEVELS[0]} to {_ZSTD_LEVELS[-1]}, blosc 0 to 9)"
    )


def codec_of(zarr_codecs: Sequence[Any]) -> str:
    """Return the explicit name of the compressor in an array's metadata. Raises ValueError or KeyError without one.

    The inner codecs are JSON values: `bytes`, the compressor if there is one, `crc32c`.
    """
    _, *compressors, _ = zarr_codecs
    if not compressors:
        return "none"
    [compressor] = compressors
    given = compressor["configuration"]
    if compressor["name"] == "zstd":
        return f"zstd:{given['level']}"
    block = f":{given['blocksize']}" if given["blocksize"] else ""
    return f"blosc:{given['cname']}:{given['clevel']}:{given['shuffle']}{block}"
