"""The tensor files below a directory, in the order in which they were written, and their identities."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from capd.pt_files.names import NameParts, name_parts

__all__ = ["ImportSource", "TensorFile", "find_files"]

_ENDINGS = (".pt", ".pth", ".pkl")
# The store keeps committed sequences for each client. A few sequences for each client give cheap catalog rows.
_CLIENTS = 1 << 12


class ImportSource(Protocol):
    """A tensor to import: the path that names it, the bytes that loading takes, client and sequence in a store."""

    @property
    def path(self) -> Path: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def capture(self) -> tuple[bytes, int]: ...


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file to import. It takes few bytes, because a directory may have a million files.

    Attributes:
        nbytes: The file's size when it was found, 0 if it is unknown.
        entry: The name of one tensor in a file of several, "" in a file of one.
    """

    directory: Path
    file_name: str
    nbytes: int
    entry: str = ""

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.directory / self.file_name

    @property
    def name(self) -> NameParts | None:
        """The parts of the file's name, None if it has no known scheme."""
        return name_parts(self.file_name)

    @property
    def capture(self) -> tuple[bytes, int]:
        """The client and the sequence of this file in a store. The same path, size and entry give the same values."""
        named = f"{self.nbytes}:".encode() + os.fsencode(self.path)
        if self.entry:
            named += b"\0" + self.entry.encode(errors="surrogateescape")
        digest = hashlib.blake2b(named, digest_size=10, person=b"capd import").digest()
        client = int.from_bytes(digest[:2]) % _CLIENTS
        return client.to_bytes(2) + b"capd import   ", int.from_bytes(digest[2:]) >> 1


def find_files(root: Path) -> list[TensorFile]:
    """Return all files below `root` with the ending of a tensor file, including symbolic links, which are not followed.

    The files of each directory are in the order of time stamp and counter, then of the name.

    Raises:
        OSError: If `root` itself cannot be read.
    """
    root = root.resolve()
    # os.walk silently skips a directory that cannot be read.
    os.listdir(root)
    found = [_tensor_file(directory, file_name) for directory, file_name in _walk(root)]
    return sorted(found, key=_order)


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    for directory, subdirectories, names in os.walk(root):
        here = Path(directory)
        yield from ((here, name) for name in names if name.lower().endswith(_ENDINGS))
        yield from ((here, name) for name in subdirectories if (here / name).is_symlink())


def _tensor_file(directory: Path, file_name: str) -> TensorFile:
    try:
        nbytes = os.lstat(directory / file_name).st_size
    except OSError:
        # The file was removed, or its directory may not be searched. Opening the file reports the reason.
        nbytes = 0
    return TensorFile(directory, file_name, nbytes)


def _order(file: TensorFile) -> tuple[str, str, int, str]:
    name = file.name
    return str(file.directory), name.stamp if name else "", name.counter if name else 0, file.file_name
