"""The codec chain of a series: how one inner chunk becomes bytes and back, and how zarr.json names it.

Only codecs that zarr-python, tensorstore and zarrs all decode, always followed by crc32c. A series' header
holds the codec's explicit name (`none`, `zstd:1`, `blosc:zstd:1:shuffle:1048576`), never a preset's, so a store
means the same whatever the presets become.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
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

__all__ = ["Chain", "Encoded", "chain_for", "crc32c", "parse_codec"]

# Chunks are encoded in parallel by the pool; blosc's own threads would only contend.
numcodecs.blosc.use_threads = False

_SHUFFLES = {"noshuffle": Blosc.NOSHUFFLE, "shuffle": Blosc.SHUFFLE, "bitshuffle": Blosc.BITSHUFFLE}
_BLOSC_LEVELS, _ZSTD_LEVELS = range(10), range(-7, 23)
_MAX_BLOCK_NBYTES = 64 << 20
_FORMS = "none, zstd:LEVEL, or blosc:lz4|zstd:LEVEL:shuffle|bitshuffle|noshuffle[:BLOCK_BYTES]"


# CRC-32C (Castagnoli) of a payload; releases the GIL for bytes only. Not wrapped: it is called thrice per small record.
crc32c: Callable[[bytes], int] = google_crc32c.value


class Encoded(NamedTuple):
    """An encoded chunk. Its checksum lies apart: putting it behind the body would copy that."""

    body: bytes
    crc: int

    @classmethod
    def of(cls, payload: bytes) -> Encoded:
        """What stands in a file, taken apart."""
        return cls(payload[:-4], int.from_bytes(payload[-4:], "little"))

    @property
    def nbytes(self) -> int:
        """Bytes in the file, with the checksum."""
        return len(self.body) + 4

    @property
    def parts(self) -> tuple[bytes, bytes]:
        """What stands in the file: the body, and its crc32c as four bytes, little-endian."""
        return self.body, struct.pack("<I", self.crc)


@dataclass(frozen=True, slots=True)
class Chain:
    """One codec chain for one stored dtype: bytes → [compressor] → crc32c; `capd.store.format.decode` goes back.

    name: the compressor's explicit name.
    """

    name: str
    stored: np.dtype[np.generic]
    compressor: Any  # numcodecs codec, or None

    def encode(self, chunk: NDArray[np.generic]) -> Encoded:
        """Encode a C-contiguous chunk of the stored dtype."""
        body: bytes = chunk.tobytes() if self.compressor is None else self.compressor.encode(chunk)
        return Encoded(body, crc32c(body))

    def zarr_codecs(self) -> list[Any]:
        """The bytes-to-bytes codecs as zarr-python objects, for writing array metadata."""
        from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

        codecs: list[Any] = []
        if isinstance(self.compressor, Blosc):
            blosc = self.compressor
            [shuffle] = [name for name, number in _SHUFFLES.items() if number == blosc.shuffle]
            codecs.append(
                BloscCodec(
                    typesize=self.stored.itemsize,
                    cname=blosc.cname,
                    clevel=blosc.clevel,
                    shuffle=shuffle,  # type: ignore[arg-type]
                    blocksize=blosc.blocksize,
                )
            )
        elif self.compressor is not None:
            codecs.append(ZstdCodec(level=self.compressor.level))
        return [*codecs, Crc32cCodec()]


@cache
def chain_for(codec: str, dtype: str) -> Chain:
    """The chain of the explicit codec name `codec` for torch dtype `dtype`. Raises ConfigError for a wrong name."""
    return Chain(codec, stored_type(dtype).stored, parse_codec(codec))


def parse_codec(codec: str) -> Any:
    """The compressor that an explicit name means, None for `none`. Raises ConfigError that lists the forms."""
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
