"""Opens foreign files of torch.save: first checks all sizes against the file, then loads with `weights_only=True`.

There are two formats. Zip archives (since torch 1.6) must have the form that torch.save writes: no compression, no two
entries of one name, no bytes counted twice. Older files are pickles followed by raw bytes. The checks limit the
allocated memory to the size of the file. Symbolic links are not followed.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from capd.pt_files.pickle_scan import BadTensorFile, declared_storages

__all__ = ["MAX_PICKLE_NBYTES", "load_tensor_file", "opened"]

# The limit for a file without its tensors' bytes. A dictionary takes about 1 KiB.
MAX_PICKLE_NBYTES = 1 << 20
_MAX_ENTRIES = 4096
_MAX_DIRECTORY_NBYTES = 1 << 20
_LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_END = struct.Struct("<4s4H2LH")
# The locator, which newer torch always writes before the end record.
_PLACE = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_TAIL = struct.Struct(f"{_END_64.size + _PLACE.size + _END.size}s")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading. Raises BadTensorFile for any other file, OSError if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise BadTensorFile("it is a symbolic link, which is not followed") from None
        raise BadTensorFile(f"it cannot be opened: {error.strerror}") from None
    # Python refuses to open a directory, and leaves its descriptor open then.
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadTensorFile("it is no regular file")
    with os.fdopen(fd, "rb") as file:
        yield file


def load_tensor_file(file: BinaryIO) -> Any:
    """Return the object that torch.save put into the file, with tensors on the CPU.

    Raises:
        BadTensorFile: If the file is damaged or foreign. It is raised before any tensor is allocated.
    """
    nbytes = os.fstat(file.fileno()).st_size
    head = file.read(max(4, len(_LEGACY_MAGIC)))
    file.seek(0)
    if head.startswith(b"PK\x03\x04"):
        _check_zip(file, nbytes)
    elif head == _LEGACY_MAGIC:
        _check_legacy(file, nbytes)
    elif not head:
        raise BadTensorFile("it is empty")
    else:
        what = "a plain pickle, which could hold any code" if head[0] == 0x80 else "no file of torch.save"
        raise BadTensorFile(f"it is {what}")
    return _load(file)


def _load(file: BinaryIO) -> Any:
    import torch

    file.seek(0)
    # The file is not mapped, though that would save a copy: if a mapped file shrinks, the process dies.
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch raises many kinds of errors for a file that it did not write.
        why = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise BadTensorFile(f"torch.load(weights_only=True) refuses it: {why[0][:200]}") from None


def _check_legacy(file: BinaryIO, nbytes: int) -> None:
    """Check five pickles (magic, version, system, object, storage keys), then each storage's size and bytes."""
    head = io.BytesIO(file.read(MAX_PICKLE_NBYTES))
    *before, declared, after = (declared_storages(head) for _ in range(5))
    if any((*before, after)):
        raise BadTensorFile("its header refers to storages")
    expected = head.tell() + sum(8 + size for size in declared.values())
    if expected != nbytes:
        raise BadTensorFile(f"its tensors are declared to end at byte {expected}, the file at byte {nbytes}")


def _check_zip(file: BinaryIO, nbytes: int) -> None:
    _check_directory(file, nbytes)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            if len({name.lower() for name in entries}) != len(archive.infolist()):
                # Torch ignores upper and lower case in these names.
                raise BadTensorFile("it has two entries of one name")
            if any(entry.filename != entry.orig_filename for entry in entries.values()):
                raise BadTensorFile("it has an entry that readers know by different names")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
                raise BadTensorFile(
                    "it is compressed, which torch.save never does: it could grow without limit"
                )
            if sum(max(entry.file_size, entry.compress_size) for entry in entries.values()) > nbytes:
                raise BadTensorFile("its entries are declared larger than the file is")
            _check_storages(archive, entries)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, ValueError) as error:
        raise BadTensorFile(f"its zip archive is cut off or damaged: {error}") from None


def _check_directory(file: BinaryIO, nbytes: int) -> None:
    """Check that the archive's directory is at its end, where every reader looks for it, and is not huge."""
    tail = _TAIL.size
    last = os.pread(file.fileno(), tail, max(0, nbytes - tail))
    magic, *_, entries, size, offset, comment = _END.unpack_from(last.rjust(tail, b"\0"), tail - _END.size)
    if magic != b"PK\x05\x06" or comment:
        raise BadTensorFile("its zip archive is cut off, or is followed by other bytes")
    end = nbytes - _END.size
    # Large archives, and all archives of newer torch, have a 64-bit end record.
    if len(last) == tail and last[_END_64.size :].startswith(b"PK\x06\x07"):
        magic, *_, entries, size, offset = _END_64.unpack_from(last)
        place = _PLACE.unpack_from(last, _END_64.size)[2]
        end = nbytes - tail
        if magic != b"PK\x06\x06" or place != end:
            raise BadTensorFile("the directory of its zip archive has two positions")
    if entries > _MAX_ENTRIES or size > _MAX_DIRECTORY_NBYTES or offset + size != end:
        raise BadTensorFile("the directory of its zip archive is not one that torch.save writes")


def _check_storages(archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo]) -> None:
    pickles = [name for name in entries if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise BadTensorFile("it is a zip archive, but none of torch.save")
    if entries[pickles[0]].file_size > MAX_PICKLE_NBYTES:
        raise BadTensorFile(f"its dictionary takes more than {MAX_PICKLE_NBYTES} bytes")
    folder = pickles[0].removesuffix("data.pkl")
    for key, declared in declared_storages(io.BytesIO(archive.read(pickles[0]))).items():
        entry = entries.get(f"{folder}data/{key}")
        held = -1 if entry is None else entry.file_size
        if held != declared:
            has = "is missing" if entry is None else f"has {held} bytes"
            raise BadTensorFile(f"a tensor's storage is declared with {declared} bytes and {has}")
