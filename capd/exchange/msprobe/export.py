"""Writes records as a dump of msprobe 26.2.0, in its layout:

DIR/step<iteration>/rank<rank>/dump.json           the entries of all nodes
                               construct.json      the parent of each node
                               stack.json          empty: capd keeps no stacks
                               capd_msprobe.json   moments of the nodes, and the record of each file
                               dump_tensor_data/   one .pt per tensor: torch.save of the bare tensor
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from capd.errors import CapdError, DamagedRecord, StoreError
from capd.exchange.msprobe.layout import DumpTensor, RankStep, parents_of, rank_steps
from capd.exchange.msprobe.names import parsed_node
from capd.exchange.msprobe.numbers import entry_numbers
from capd.exchange.peers import ExportRequest
from capd.output_directory import ExportedFile, locked_directory, write_new
from capd.store.format.dtypes import stored_type, to_values
from capd.store.quantised.dequantise import class_of
from capd.store.read.series import Record, Series, tensor_of

if TYPE_CHECKING:
    import torch

__all__ = ["export_files"]

_CROWDED_OUT = "another record has their place in dump.json"
_FORMAT = 1
_STAGING = ".capd-export-files"
_SPARE_NBYTES = 1 << 20


def export_files(request: ExportRequest) -> Iterator[ExportedFile]:
    """Write a dump below `request.out`. No file is replaced. Records that are in no file are counted in `left_out`.

    Yields:
        Each file when it is whole. A rank's dump.json follows the tensors that it names.

    Raises:
        StoreBusy: Another export writes to the directory.
        StoreFull: The disk is full.
        CapdError: A file exists already.
        DamagedRecord: A record cannot be read exactly.
    """
    steps = rank_steps(request.chosen, repeat_weights=request.repeat_weights)
    with locked_directory(request.out), _staging(request.out) as staging:
        for step in steps:
            if step.crowded_out:
                request.leave_out(_CROWDED_OUT, step.crowded_out)
            yield from _RankStepFiles(request, step, staging).written()


@contextmanager
def _staging(out: Path) -> Iterator[Path]:
    # The caller holds the lock of `out`, so what is there is left of a killed export.
    place = out / _STAGING
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


class _RankStepFiles:
    """The files of one rank in one step."""

    def __init__(self, request: ExportRequest, step: RankStep, staging: Path) -> None:
        self._request, self._step, self._staging = request, step, staging
        self._directory = request.out / f"step{step.iteration}" / f"rank{step.rank}"
        self._entries: dict[str, dict[str, Any]] = {}
        self._origins: dict[str, dict[str, Any]] = {}

    def written(self) -> Iterator[ExportedFile]:
        """Write all files and yield each."""
        data = self._directory / "dump_tensor_data"
        data.mkdir(parents=True, exist_ok=True)
        has_tensors, numbers_alone = False, 0
        for tensor in self._step.tensors:
            record = tensor.series.record(tensor.number)
            try:
                entry, values = _entry(tensor.series, record)
            except DamagedRecord:
                raise
            except CapdError:
                self._request.leave_out("a part of their quantised tensor is missing", tensor.parts)
                continue
            node = self._entries.setdefault(tensor.node, _empty_entry(tensor.node))
            if not _put(node, tensor.path, entry):
                self._request.leave_out(_CROWDED_OUT, tensor.parts)
                continue
            if values is None:
                numbers_alone += 1
                continue
            has_tensors = True
            entry["data_name"] = tensor.file_name
            self._origins[tensor.file_name] = _origin(tensor)
            nbytes = _save(values, self._staging / tensor.file_name, data / tensor.file_name)
            yield ExportedFile(data / tensor.file_name, nbytes, tensor.parts, values.nbytes)
        yield from self._documents(data, has_tensors, numbers_alone)

    def _documents(self, data: Path, has_tensors: bool, numbers_alone: int) -> Iterator[ExportedFile]:
        dump = {
            "task": "tensor" if has_tensors else "statistics",
            "level": "L0" if all(name.startswith("Module.") for name in self._entries) else "mix",
            "framework": "pytorch",
            "dump_data_dir": str(data.absolute()) if has_tensors else None,
            "data": self._entries,
        }
        capd = {
            "format": _FORMAT,
            "run": self._request.run_id,
            "iteration": self._step.iteration,
            "rank": self._step.rank,
            "nodes": self._step.moments,
            "files": self._origins,
        }
        documents = {
            "construct.json": parents_of(self._entries),
            "stack.json": {},
            "capd_msprobe.json": capd,
            # The last one: a directory with a dump.json is a whole dump.
            "dump.json": dump,
        }
        for name, document in documents.items():
            # A record of numbers alone is in dump.json.
            records = numbers_alone if document is dump else 0
            nbytes = _write_json(self._directory / name, document)
            yield ExportedFile(self._directory / name, nbytes, records, 0)


def _write_json(path: Path, document: Any) -> int:
    # msprobe writes NaN and infinities as Python does, and reads them so.
    text = json.dumps(document, indent=1).encode()

    def write(file: BinaryIO) -> None:
        file.write(text)

    return write_new(path, write)


def _origin(tensor: DumpTensor) -> dict[str, Any]:
    series = tensor.series
    return {
        "series": series.path,
        "record": tensor.number,
        "dtype": series.dtype,
        "tensor": series.key.tensor_name,
    }


def _empty_entry(node: str) -> dict[str, Any]:
    parts = parsed_node(node)
    if parts is None or parts.direction == "forward":
        return {"input_args": [], "input_kwargs": {}, "output": [], "parameters": {}}
    return {"input": [], "output": []} if parts.direction == "backward" else {}


def _put(entry: dict[str, Any], path: tuple[str | int | None, ...], value: dict[str, Any]) -> bool:
    """Put a tensor's entry at its path, and return whether it fits. Lists are filled with None up to its position.

    It does not fit if another tensor of the node has its place, or has a list where it needs a map.
    """
    at: Any = entry
    for step, following in pairwise(path):
        at = _set(at, step, {} if isinstance(following, str) else [])
        if at is None:
            return False
    return _set(at, path[-1], value) is value


def _set(at: Any, step: str | int | None, value: Any) -> Any:
    """Put a value where nothing is yet, and return what is there, None if nothing can be."""
    # The description of a tensor is a map, too.
    if isinstance(at, dict) and not isinstance(at.get("type"), str):
        return at.setdefault(str(step), value)
    if not isinstance(at, list) or isinstance(step, str):
        return None
    position = len(at) if step is None else step
    at.extend([None] * (position + 1 - len(at)))
    if at[position] is None:
        at[position] = value
    return at[position]


def _entry(series: Series, record: Record) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Return the entry of a record and the tensor to save; None if only the statistics are there."""
    said = record.metadata.get("msprobe")
    if isinstance(said, dict) and isinstance(said.get("statistics"), dict):
        return dict(said["statistics"]), None
    tensor, values, original = _tensor_and_values(series, record)
    entry: dict[str, Any] = {
        "type": "torch.Tensor",
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        **entry_numbers(values),
        "requires_grad": record.requires_grad,
    }
    if original:
        entry["capd_dtype"] = original
    return entry, tensor


def _tensor_and_values(series: Series, record: Record) -> tuple[torch.Tensor, NDArray[np.generic], str]:
    """Return the tensor, its numbers, and the captured dtype if the tensor has another.

    msprobe has no statistics of 8-bit and 4-bit formats, so their numbers are written as float32, which is exact.
    """
    import torch

    if class_of(record.attributes) is not None:
        whole = record.torch(dequantise=True).float()
        return whole, whole.numpy(), series.dtype
    bits = record.numpy()
    values = to_values(bits, series.dtype)
    if stored_type(series.dtype).encoding == "bits" and series.dtype != "bfloat16":
        return torch.from_numpy(np.asarray(values, np.float32)), values, series.dtype
    return tensor_of(bits, series.dtype), values, ""


def _write_zeros(path: Path, nbytes: int) -> None:
    piece = bytes(min(nbytes, _SPARE_NBYTES))
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-nbytes // len(piece))):
            file.write(piece)


def _save(tensor: torch.Tensor, staged: Path, path: Path) -> int:
    """Save a bare tensor as torch.save(tensor, path) does, whose archive has the name of the file.

    The file is written in the staging directory under its own name, so a file in its place is whole.
    """
    import torch

    try:
        torch.save(tensor, staged)
        os.link(staged, path)
    except FileExistsError:
        raise CapdError(f"{path} exists already; export into another directory") from None
    except RuntimeError as error:
        # torch's own writer says only that it failed. Python's own says that the disk is full, or the file too large.
        _write_zeros(staged, tensor.nbytes + _SPARE_NBYTES)
        raise StoreError(f"cannot write {path}: {str(error).splitlines()[0]}") from error
    nbytes = staged.stat().st_size
    staged.unlink()
    return nbytes
