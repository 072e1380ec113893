"""Reads dumps of msprobe: the tensors that each dump.json names, one after the other.

Only files directly in a dump's own dump_tensor_data are read, and only if they are tensors of torch.save. An entry that
has numbers and no tensor becomes a record without elements, with the numbers in its metadata.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from capd.exchange.msprobe.dumps import Dump
from capd.exchange.msprobe.entries import capture_of_entry, tensors_of
from capd.exchange.msprobe.json_stream import entries_of
from capd.exchange.msprobe.names import is_plain_name
from capd.pt_files.import_ import bits_of
from capd.pt_files.load import load_tensor_file, opened
from capd.pt_files.pickle_scan import BadTensorFile
from capd.pt_files.writer import ImportedRecord

__all__ = ["DumpedTensor", "dumped_tensors", "load_dumped"]

_CLIENTS = 1 << 12
_SHOWN_CHARS = 120


@dataclass(frozen=True, slots=True)
class DumpedTensor:
    """A tensor that a dump.json names. `problem`: why the entry cannot be read, "" if nothing is known against it."""

    dump: Dump
    node: str
    place: tuple[str | int, ...]
    told: dict[str, Any]
    order: int
    nbytes: int = 0
    problem: str = ""

    @property
    def path(self) -> Path:
        """The file of the tensor; the dump.json with the entry's name if there is none."""
        name = self.told.get("data_name")
        if is_plain_name(name):
            return self.dump.directory / "dump_tensor_data" / str(name)
        where = self.entry
        return self.dump.directory / (f"dump.json: {where}" if where else "dump.json")

    @property
    def entry(self) -> str:
        """The node and the place of the tensor in it, as far as a message shows them."""
        return ".".join(filter(None, [self.node[:_SHOWN_CHARS], *map(str, self.place)]))[:_SHOWN_CHARS]

    @property
    def capture(self) -> tuple[bytes, int]:
        """The client and the sequence in a store. The same entry of the same dump gives the same values."""
        named = f"{self.order}:{self.nbytes}:{self.node}:{self.place}:".encode(errors="replace")
        named += os.fsencode(self.dump.directory)
        digest = hashlib.blake2b(named, digest_size=10, person=b"capd msprobe").digest()
        client = int.from_bytes(digest[:2]) % _CLIENTS
        return client.to_bytes(2) + b"capd msprobe  ", int.from_bytes(digest[2:]) >> 1


def dumped_tensors(dumps: Iterable[Dump]) -> Iterator[DumpedTensor]:
    """Yield the tensors that the dumps name, in order."""
    for dump in dumps:
        yield from _tensors_in(dump)


def _tensors_in(dump: Dump) -> Iterator[DumpedTensor]:
    order = 0
    if dump.problem:
        yield DumpedTensor(dump, "", (), {}, 1, problem=dump.problem)
        return
    try:
        with opened(dump.directory / "dump.json") as file:
            for node, entry in entries_of(file):
                order += 1
                try:
                    for place, told in tensors_of(entry):
                        order += 1
                        yield DumpedTensor(dump, node, place, told, order, _nbytes(dump, told))
                except BadTensorFile as error:
                    yield DumpedTensor(dump, node, (), {}, order, problem=str(error))
    except (BadTensorFile, OSError) as error:
        what = "the rest of it cannot be read" if order else "it cannot be read"
        yield DumpedTensor(dump, "", (), {}, order + 1, problem=f"{what}: {error}")


def _nbytes(dump: Dump, told: dict[str, Any]) -> int:
    name = told.get("data_name")
    if not is_plain_name(name):
        return 0
    try:
        return (dump.directory / "dump_tensor_data" / str(name)).lstat().st_size
    except OSError:
        return 0


def load_dumped(source: DumpedTensor) -> ImportedRecord:
    """Check and load one tensor.

    Raises:
        BadTensorFile: The entry or its file is damaged or hostile.
        OSError: The file cannot be read.
    """
    if source.problem:
        raise BadTensorFile(source.problem)
    try:
        return _loaded(source)
    except BadTensorFile as error:
        if is_plain_name(source.told.get("data_name")):
            # Several entries may name one file.
            raise BadTensorFile(f"{source.entry}: {error}") from None
        raise


def _loaded(source: DumpedTensor) -> ImportedRecord:
    told, dtype = source.told, None
    if "data_name" in told:
        dtype, bits = bits_of(_tensor(source))
    else:
        dtype, bits = None, np.zeros(0, np.float32)
    capture = capture_of_entry(source.dump, source.node, source.place, told, source.order, dtype)
    return ImportedRecord(source, capture, dtype or "float32", bits)


def _tensor(source: DumpedTensor) -> Any:
    import torch

    name = source.told["data_name"]
    if not is_plain_name(name):
        raise BadTensorFile(
            f"its data_name {str(name)[:_SHOWN_CHARS]!r} is no plain name of a file in the dump"
        )
    if not str(name).endswith(".pt"):
        raise BadTensorFile("only tensors of torch.save (.pt) can be read")
    if not stat.S_ISDIR(source.path.parent.lstat().st_mode):
        raise BadTensorFile("its dump_tensor_data is a symbolic link, which is not followed")
    with opened(source.path) as file:
        tensor = load_tensor_file(file)
    if not isinstance(tensor, torch.Tensor):
        raise BadTensorFile(f"it holds a {type(tensor).__name__}, not a tensor")
    return tensor
