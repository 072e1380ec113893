"""Opens files that others wrote with torch.save: sizes checked against the file first, `weights_only=True` after.

Two formats: zip archives (since torch 1.6), of which only what torch.save writes is accepted (nothing compressed, no
two entries of one name, no bytes counted twice), and the pickles with raw bytes behind them of the time before. So what
is allocated is at most what the file has on the disk. Symbolic links are not followed.
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

from capd.pt_files.pickle_scan import BadTensorFile, scan_pickle

__all__ = ["MAX_PICKLE_NBYTES", "load_tensor_file", "opened"]

MAX_PICKLE_NBYTES = 1 << 20  # of everything in a file but the tensors' bytes; a dictionary takes about 1 KiB
_MAX_ENTRIES = 4096
_MAX_DIRECTORY_NBYTES = 1 << 20
_LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_END = struct.Struct("<4s4H2LH")
_PLACE = struct.Struct("<4sLQL")  # of the record before it, which newer torch always writes
_END_64 = struct.Struct("<4sQ2H2L4Q")
_TAIL = struct.Struct(f"{_END_64.size + _PLACE.size + _END.size}s")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file for reading. Raises BadTensorFile for anything else, OSError where it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise BadTensorFile("it is a symbolic link, and these are not followed") from None
        raise BadTensorFile(f"it cannot be opened: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise BadTensorFile("it is no regular file")
        yield file


def load_tensor_file(file: BinaryIO) -> Any:
    """The object that torch.save put into the file, tensors on the CPU. Raises BadTensorFile before it allocates."""
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
    # Not mapped, though that would save a copy: a file that shrinks in the middle would then end the process.
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch says of a file that it did not write
        why = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise BadTensorFile(f"torch.load(weights_only=True) refuses it: {why[0][:200]}") from None


def _check_legacy(file: BinaryIO, nbytes: int) -> None:
    """Five pickles (magic, version, system, object, storage keys), then of each storage its size and its bytes."""
    head = io.BytesIO(file.read(MAX_PICKLE_NBYTES))
    scans = [scan_pickle(head) for _ in range(5)]
    if any(scan.storages for scan in (*scans[:3], scans[4])):
        raise BadTensorFile("its header refers to storages")
    declared = scans[3].storages
    expected = head.tell() + sum(8 + size for size in declared.values())
    if expected != nbytes:
        raise BadTensorFile(f"its tensors are declared to end at byte {expected}, the file at byte {nbytes}")


def _check_zip(file: BinaryIO, nbytes: int) -> None:
    _check_directory(file, nbytes)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            if len({name.lower() for name in entries}) != len(archive.infolist()):
                raise BadTensorFile("it has two entries of one name")  # torch takes upper case for lower case
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
    """Checks that the archive's directory is at its end, where every reader looks for it, and is not a huge one."""
    tail = _TAIL.size
    last = os.pread(file.fileno(), tail, max(0, nbytes - tail))
    magic, *_, entries, size, offset, comment = _END.unpack_from(last.rjust(tail, b"\0"), tail - _END.size)
    if magic != b"PK\x05\x06" or comment:
        raise BadTensorFile("its zip archive is cut off, or something stands behind it")
    end = nbytes - _END.size
    if len(last) == tail and last[_END_64.size :].startswith(
        b"PK\x06\x07"
    ):  # large ones, and all of newer torch
        magic, *_, entries, size, offset = _END_64.unpack_from(last)
        place = _PLACE.unpack_from(last, _END_64.size)[2]
        end = nbytes - tail
        if magic != b"PK\x06\x06" or place != end:
            raise BadTensorFile("the directory of its zip archive stands in two places")
    if entries > _MAX_ENTRIES or size > _MAX_DIRECTORY_NBYTES or offset + size != end:
        raise BadTensorFile("the directory of its zip archive is not one that torch.save writes")


def _check_storages(archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo]) -> None:
    pickles = [name for name in entries if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise BadTensorFile("it is a zip archive, but none of torch.save")
    if entries[pickles[0]].file_size > MAX_PICKLE_NBYTES:
        raise BadTensorFile(f"its dictionary takes more than {MAX_PICKLE_NBYTES} bytes")
    folder = pickles[0].removesuffix("data.pkl")
    for key, declared in scan_pickle(io.BytesIO(archive.read(pickles[0]))).storages.items():
        entry = entries.get(f"{folder}data/{key}")
        held = -1 if entry is None else entry.file_size
        if held != declared:
            has = "is missing" if entry is None else f"has {held} bytes"
            raise BadTensorFile(f"a tensor's storage is declared with {declared} bytes and {has}")
