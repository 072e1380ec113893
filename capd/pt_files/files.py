"""Which files below a directory are tensor files, in the order in which they were written, and who each of them is."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from capd.pt_files.names import NameParts, name_parts

__all__ = ["TensorFile", "find_files"]

_ENDINGS = (".pt", ".pth", ".pkl")
_CLIENTS = 1 << 12  # committed sequences are kept per client; a few each make cheap rows in the catalog


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file to import; as few bytes as can be, for directories of a million. nbytes: its size when it was found, 0
    where that is unknown."""

    directory: Path
    file_name: str
    nbytes: int

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.directory / self.file_name

    @property
    def name(self) -> NameParts | None:
        """The parts of its name."""
        return name_parts(self.file_name)

    @property
    def capture(self) -> tuple[bytes, int]:
        """Client and sequence that stand for this file in a store: the same ones for the same path and size."""
        named = f"{self.nbytes}:".encode() + os.fsencode(self.path)
        digest = hashlib.blake2b(named, digest_size=10, person=b"capd import").digest()
        client = int.from_bytes(digest[:2]) % _CLIENTS
        return client.to_bytes(2) + b"capd import   ", int.from_bytes(digest[2:]) >> 1


def find_files(root: Path) -> list[TensorFile]:
    """All files below `root` that have a tensor file's ending; symbolic links among them, which are not followed.

    In each directory by time stamp and counter, then by name. Raises OSError where `root` itself cannot be read.
    """
    root = root.resolve()
    os.listdir(root)  # os.walk says nothing of a directory that cannot be read
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
    except OSError:  # gone meanwhile, or in a directory that may not be searched: opening it says so
        nbytes = 0
    return TensorFile(directory, file_name, nbytes)


def _order(file: TensorFile) -> tuple[str, str, int, str]:
    name = file.name
    return str(file.directory), name.stamp if name else "", name.counter if name else 0, file.file_name
