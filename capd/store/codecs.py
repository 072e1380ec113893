"""The codec chain of a series: how one inner chunk becomes bytes and back, and how zarr.json names it.

Only codecs that zarr-python, tensorstore and zarrs all decode, always followed by crc32c. Blosc needs the
explicit 1 MiB block: its automatic block is smaller than zstd's 128 KiB literal blocks times the item size,
so exponent and mantissa bytes would share one Huffman table (1.27x instead of 1.45x on bf16).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import google_crc32c
import numcodecs.blosc
import numpy as np
from numcodecs import Blosc, Zstd
from numpy.typing import NDArray

from capd.errors import ConfigError, DamagedRecord
from capd.store.dtypes import stored_type

__all__ = ["Chain", "chain_for", "crc32c"]

numcodecs.blosc.use_threads = (
    False  # chunks are encoded in parallel by the pool; blosc's own threads would only contend
)

_BLOCK_NBYTES = 1 << 20


def crc32c(payload: bytes) -> int:
    """CRC-32C (Castagnoli) of `payload`; releases the GIL for bytes only."""
    return int(google_crc32c.value(payload))


@dataclass(frozen=True, slots=True)
class Chain:
    """One named codec chain for one stored dtype: bytes → [compressor] → crc32c."""

    name: str
    stored: np.dtype[np.generic]
    compressor: Any  # numcodecs codec, or None

    def encode(self, chunk: NDArray[np.generic]) -> bytes:
        """Encode a C-contiguous chunk of the stored dtype; the last four bytes are the crc32c of the rest."""
        body: bytes = chunk.tobytes() if self.compressor is None else self.compressor.encode(chunk)
        return body + struct.pack("<I", crc32c(body))

    def decode(self, payload: bytes, shape: tuple[int, ...]) -> NDArray[np.generic]:
        """Decode what `encode` gave; raises DamagedRecord if the checksum or the decoded size is wrong."""
        body = payload[:-4]
        if len(payload) < 4 or struct.unpack("<I", payload[-4:])[0] != crc32c(body):
            raise DamagedRecord("checksum mismatch (crc32c)")
        try:
            raw = body if self.compressor is None else self.compressor.decode(body)
            return np.frombuffer(raw, dtype=self.stored).reshape(shape)
        except (ValueError, RuntimeError) as error:
            raise DamagedRecord(f"cannot decode: {error}") from error

    def zarr_codecs(self) -> list[Any]:
        """The bytes-to-bytes codecs as zarr-python objects, for writing array metadata."""
        from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

        codecs: list[Any] = []
        if isinstance(self.compressor, Blosc):
            blosc = self.compressor
            codecs.append(
                BloscCodec(
                    typesize=self.stored.itemsize,
                    cname=blosc.cname,
                    clevel=blosc.clevel,
                    shuffle="bitshuffle" if blosc.shuffle == Blosc.BITSHUFFLE else "shuffle",
                    blocksize=blosc.blocksize,
                )
            )
        elif self.compressor is not None:
            codecs.append(ZstdCodec(level=self.compressor.level))
        return [*codecs, Crc32cCodec()]


_WIDE_FLOATS = frozenset({"bfloat16", "float16", "float32", "float64"})


@cache
def chain_for(codec: str, dtype: str) -> Chain:
    """The chain that preset `codec` ("default" or "fast") means for torch dtype `dtype`."""
    if codec not in ("default", "fast"):
        raise ConfigError(f'unknown codec {codec!r}; choose "default" or "fast"')
    stored = stored_type(dtype).stored
    return Chain(codec, stored, _compressor(codec, dtype))  # type: ignore[arg-type]


def _compressor(codec: Literal["default", "fast"], dtype: str) -> Any:
    if dtype in _WIDE_FLOATS:
        if codec == "fast":
            return Blosc(cname="lz4", clevel=5, shuffle=Blosc.BITSHUFFLE)
        return Blosc(cname="zstd", clevel=1, shuffle=Blosc.SHUFFLE, blocksize=_BLOCK_NBYTES)
    if dtype == "float8_e8m0fnu":
        return Zstd(level=3)
    return None if codec == "fast" else Zstd(level=1)
