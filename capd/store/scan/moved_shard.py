"""The stub of a shard that was moved to an object store: a small file in its place, which names the object.

    capd moved shard
    {"format":1,"to":"s3://bucket/prefix/run.zarr","key":"<series path>/data/c/0/0/0","nbytes":…,"crc32c":"89abcdef"}
    <crc32c of the lines before, as eight hexadecimal digits>

After the text comes a hole, up to the size of the shard. Zarr readers fill a missing shard with zeros in silence, and
zarr-python also a chunk after the end of a file. A reader may have read the index before the shard was moved: it then
finds zeros in the place of a chunk, and zeros fail each checksum, that of a chunk and that of an index. So it raises.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import msgspec

from capd.errors import ConfigError, DamagedRecord, StoreError
from capd.store.documents.json_document import MAX_LENGTH
from capd.store.format.codecs import crc32c
from capd.store.objects.address import Address, parse_address

__all__ = [
    "MAX_STUB_NBYTES",
    "STUB_GLOB",
    "MovedShard",
    "begins_as_stub",
    "encode_stub",
    "is_mostly_hole",
    "moved_shard",
    "read_stub",
]

MAX_STUB_NBYTES = 8192
"""The text of a stub has no more bytes."""

STUB_GLOB = "moving-*.tmp"
"""The names of new stubs in the directory of a node, before they take the place of their shards."""

STUB_FORMAT = 1
_MAGIC = b"capd moved shard\n"
_KEY = re.compile(r"(?:[^/]+/){5}data/c/(?:0|[1-9][0-9]*)(?:/0)*")
_CRC = re.compile(r"[0-9a-f]{8}")


class _Plain(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    to: str
    key: str
    nbytes: int
    crc32c: str


@dataclass(frozen=True, slots=True)
class MovedShard:
    """A shard in an object store.

    Attributes:
        to: The address of the run.
        key: The key of the shard below it, which is its path in the run.
        nbytes: The bytes of the shard.
        crc32c: Their checksum.
    """

    to: Address
    key: str
    nbytes: int
    crc32c: int

    @property
    def address(self) -> Address:
        """The address of the object."""
        return self.to / self.key


def encode_stub(moved: MovedShard) -> bytes:
    """Return the text of a stub. In a file, a hole follows it."""
    plain = _Plain(STUB_FORMAT, str(moved.to), moved.key, moved.nbytes, f"{moved.crc32c:08x}")
    body = _MAGIC + msgspec.json.encode(plain) + b"\n"
    return body + b"%08x\n" % crc32c(body)


def begins_as_stub(payload: bytes) -> bool:
    """Return whether the first bytes of a file are those of a stub. No shard begins like this."""
    return payload.startswith(_MAGIC)


def is_mostly_hole(info: os.stat_result) -> bool:
    """Return whether a file takes little of its size. Stubs do, as long as no copy wrote their holes."""
    return info.st_blocks * 512 <= info.st_size // 2


def read_stub(payload: bytes, key: str) -> MovedShard | None:
    """Return what a stub says; None if the bytes do not begin as one.

    Args:
        payload: The first MAX_STUB_NBYTES bytes of a file in a run that may come from anybody.
        key: The path of the file in the run.

    Raises:
        DamagedRecord: The stub is damaged, or of another shard.
        StoreError: A newer capd wrote it.
    """
    if not begins_as_stub(payload):
        return None
    end = payload.find(b"\n", payload.find(b"\n", len(_MAGIC)) + 1) + 1
    body, check = payload[: end - 9], payload[end - 9 : end]
    if check != b"%08x\n" % crc32c(body) or payload[end:].strip(b"\0"):
        raise DamagedRecord("the stub of a moved shard fails its checksum")
    try:
        version = msgspec.json.decode(body[len(_MAGIC) :], type=dict).get("format")
        if type(version) is int and version > STUB_FORMAT:
            raise StoreError(f"a newer capd wrote the stub of a moved shard (format {version}); upgrade capd")
        plain = msgspec.json.decode(body[len(_MAGIC) :], type=_Plain)
        to = parse_address(plain.to)
        if plain.format != STUB_FORMAT or not to.is_run or not _KEY.fullmatch(plain.key):
            raise ValueError("it names no shard of a run")
        if not 0 < plain.nbytes <= MAX_LENGTH or not _CRC.fullmatch(plain.crc32c):
            raise ValueError("its numbers are not valid")
        if plain.key != key:
            raise ValueError(f"it is of {plain.key}")
    except (msgspec.MsgspecError, ConfigError, ValueError, RecursionError) as error:
        raise DamagedRecord(f"the stub of a moved shard is not valid: {error}") from error
    return MovedShard(to, plain.key, plain.nbytes, int(plain.crc32c, 16))


def moved_shard(run: Path, shard: Path) -> MovedShard | None:
    """Return where a shard file of a run was moved to; None if it is no stub, or missing.

    Raises:
        DamagedRecord: It is a damaged stub.
        StoreError: A newer capd wrote it.
        OSError: The file cannot be read.
    """
    try:
        fd = os.open(shard, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        payload = os.pread(fd, MAX_STUB_NBYTES, 0)
    finally:
        os.close(fd)
    return read_stub(payload, shard.relative_to(run).as_posix())
