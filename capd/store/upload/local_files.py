"""The local files of an upload: what tells one version of a file from the next, and their checksums."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import msgspec

from capd.store.disk.files import rename, write_file
from capd.store.scan.moved_shard import MAX_STUB_NBYTES, begins_as_stub

__all__ = ["FileVersion", "KnownFiles", "OpenShard", "extended_crc32c"]

_PIECE_NBYTES = 1 << 20
_MAX_CACHE_NBYTES = 1 << 30


class FileVersion(NamedTuple):
    """What changes with each version of a file: a continued shard is a new file under the old name."""

    nbytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileVersion:
        """Return the version that a stat shows."""
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


def extended_crc32c(crc: int, piece: bytes) -> int:
    """Return the crc32c of bytes with the checksum `crc`, followed by `piece`."""
    return int(google_crc32c.extend(crc, piece))


class OpenShard:
    """A file that is read from one descriptor: it stays the same if another one takes its name."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            OSError: It is gone or cannot be read.
        """
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        self.version = FileVersion.of(os.fstat(self._fd))

    def __enter__(self) -> OpenShard:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def is_stub(self) -> bool:
        """Whether it is the stub of a moved shard, sound or damaged."""
        return begins_as_stub(os.pread(self._fd, MAX_STUB_NBYTES, 0))

    def pieces(self, nbytes: int = _PIECE_NBYTES) -> Iterator[bytes]:
        """Yield the content in pieces.

        Raises:
            OSError: It cannot be read, or is shorter than it was.
        """
        at = 0
        while at < self.version.nbytes:
            piece = os.pread(self._fd, min(nbytes, self.version.nbytes - at), at)
            if not piece:
                raise OSError(f"a file ends after {at} of {self.version.nbytes} bytes")
            yield piece
            at += len(piece)

    def crc32c(self) -> int:
        """Return the checksum of the content."""
        crc = 0
        for piece in self.pieces():
            crc = extended_crc32c(crc, piece)
        return crc


class KnownFiles:
    """The checksums of uploaded files by their keys, valid while the file's version stays.

    The file `upload/files.msgpack` in the node's directory is a cache: without it, files are read again.
    """

    def __init__(self, directory: Path) -> None:
        """Read the cache in the directory of a node. One that is damaged or missing is empty."""
        self._place = directory / "upload" / "files.msgpack"
        self._known: dict[str, tuple[int, int, int, int]] = {}
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            fd = os.open(self._place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            with open(fd, "rb") as file:
                payload = file.read(_MAX_CACHE_NBYTES)
            self._known = msgspec.msgpack.decode(payload, type=dict[str, tuple[int, int, int, int]])

    def crc32c(self, key: str, version: FileVersion) -> int | None:
        """Return the checksum of a file of this version; None if it is unknown."""
        found = self._known.get(key)
        return found[3] if found is not None and found[:3] == version else None

    def note(self, key: str, version: FileVersion, crc32c: int) -> None:
        """Remember a checksum."""
        self._known[key] = (*version, crc32c)

    def keep(self, keys: set[str]) -> None:
        """Forget all other files."""
        self._known = {key: found for key, found in self._known.items() if key in keys}

    def save(self) -> None:
        """Write the cache. Raises OSError, also if the run has been removed."""
        temporary = self._place.with_name("files.tmp")
        write_file(temporary, msgspec.msgpack.encode(self._known))
        rename(temporary, self._place)
