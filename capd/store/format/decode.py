"""Decodes one inner chunk directly into its destination array, after all its claims are checked."""

from __future__ import annotations

import struct

import numpy as np
from numcodecs import Blosc, Zstd
from numpy.typing import NDArray

from capd.errors import DamagedRecord
from capd.store.format.codecs import Chain, crc32c

__all__ = ["decode", "decode_into"]

# The crc32c of any bytes followed by their own little-endian crc32c.
_RESIDUE = 0x48674BC7
_BLOSC_HEADER_NBYTES = 16
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def decode(chain: Chain, payload: bytes, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Return the elements of an encoded chunk as a new array.

    Raises:
        DamagedRecord: The checksum or the decoded size is wrong.
    """
    out = np.empty(shape, dtype=chain.stored)
    decode_into(chain, payload, out)
    return out


def decode_into(chain: Chain, payload: bytes, out: NDArray[np.generic]) -> None:
    """Decode a chunk into `out`.

    Args:
        chain: The codec chain of the series.
        payload: The stored bytes, including the checksum.
        out: A C-contiguous array of the chain's stored dtype. Its content is undefined after an error.

    Raises:
        DamagedRecord: The checksum or the decoded size is wrong.
    """
    if len(payload) < 4 or crc32c(payload) != _RESIDUE:
        raise DamagedRecord("a chunk fails its checksum (crc32c)")
    body = memoryview(payload)[:-4]
    target = out.reshape(-1).view(np.uint8)
    nbytes = _decoded_nbytes(chain, body)
    if nbytes != target.nbytes:
        raise DamagedRecord(f"a chunk decodes to {nbytes} bytes instead of {target.nbytes}")
    if chain.compressor is None:
        target[:] = np.frombuffer(body, np.uint8)
        return
    try:
        chain.compressor.decode(body, target)
    except (ValueError, RuntimeError) as error:
        raise DamagedRecord(f"a chunk cannot be decoded: {error}") from error


def _decoded_nbytes(chain: Chain, body: memoryview) -> int | None:
    """Return the decoded size that the encoded bytes claim; None if they do not state it.

    The check is necessary because the codecs accept a larger target and fill a part of it.
    """
    if chain.compressor is None:
        return len(body)
    if isinstance(chain.compressor, Blosc):
        return int(struct.unpack_from("<I", body, 4)[0]) if len(body) >= _BLOSC_HEADER_NBYTES else None
    if isinstance(chain.compressor, Zstd):
        return _zstd_content_nbytes(body)
    raise TypeError(f"no decoder for {chain.compressor!r}")


def _zstd_content_nbytes(body: memoryview) -> int | None:
    """Return the Frame_Content_Size of a Zstandard frame (RFC 8878, section 3.1.1.1)."""
    if body[:4] != _ZSTD_MAGIC or len(body) < 6:
        return None
    descriptor = body[4]
    single_segment = descriptor >> 5 & 1
    nbytes = (single_segment, 2, 4, 8)[descriptor >> 6]
    at = 5 + (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3]
    if nbytes == 0 or len(body) < at + nbytes:
        return None
    content = int.from_bytes(body[at : at + nbytes], "little")
    return content + 256 if nbytes == 2 else content
