"""The stub of a shard that was moved to an object store: a small file in its place, which names the object.

    capd moved shard
    {"format":1,"to":"s3://bucket/prefix/run.zarr","key":"<series path>/data/c/0/0/0","nbytes":…,"crc32c":"89abcdef"}
    <crc32c of the lines before, as eight hexadecimal digits>

Zarr readers fill a missing shard with zeros in silence. The stub is neither a frame nor an index, so they raise: the
last bytes of it fail the checksum of an index. Were the checksum right by chance, each entry would still be a place
beyond the end of the file, because ASCII text never encodes an empty entry.
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

__all__ = ["MAX_STUB_NBYTES", "STUB_GLOB", "MovedShard", "encode_stub", "moved_shard", "read_stub"]

MAX_STUB_NBYTES = 8192
"""No stub is larger. A file of more bytes need not be opened to know that it is none."""

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
    """Return the content of a stub."""
    plain = _Plain(STUB_FORMAT, str(moved.to), moved.key, moved.nbytes, f"{moved.crc32c:08x}")
    body = _MAGIC + msgspec.json.encode(plain) + b"\n"
    return body + b"%08x\n" % crc32c(body)


def read_stub(payload: bytes, key: str) -> MovedShard | None:
    """Return what a stub says; None if the bytes do not begin as one.

    Args:
        payload: The first MAX_STUB_NBYTES + 1 bytes of a file in a run that may come from anybody.
        key: The path of the file in the run.

    Raises:
        DamagedRecord: The stub is damaged, or of another shard.
        StoreError: A newer capd wrote it.
    """
    if not payload.startswith(_MAGIC):
        return None
    body, check = payload[:-9], payload[-9:]
    if len(payload) > MAX_STUB_NBYTES or check != b"%08x\n" % crc32c(body):
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
        info = os.stat(shard)
        # A shard of usual size is not opened.
        if info.st_size > MAX_STUB_NBYTES or not stat.S_ISREG(info.st_mode):
            return None
        fd = os.open(shard, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        payload = os.pread(fd, MAX_STUB_NBYTES + 1, 0)
    finally:
        os.close(fd)
    return read_stub(payload, shard.relative_to(run).as_posix())
