"""Writes whole tensors, put together from the parts of all ranks, as .pt or .npz files.

A .pt file holds one tensor at one moment, in the dictionary of tensor_saver. Its metadata["logical"] says from what the
tensor was put together. An .npz file holds one tensor at all moments: an array for each, named by its number, and the
string array `capd` with JSON: {"format": 1, "run", "logical", "key", "records": [{"record", "shape", moment}]}.
"""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from capd.io.arrays import add_npy
from capd.output_directory import ExportedFile, locked_directory, write_new
from capd.pt_files.dictionary import Naming, standard_metadata
from capd.pt_files.export import save_object
from capd.pt_files.names import file_name, stamp_of
from capd.pt_files.statistics import saved_statistics
from capd.store.documents.names import component
from capd.store.logical.series import LogicalSeries
from capd.store.read.series import tensor_of
from capd_client.protocol.key import Moment

__all__ = ["described_whole", "export_whole_tensors"]

_FORMAT = 1


def export_whole_tensors(
    run_id: str, chosen: Sequence[LogicalSeries], out: Path, to: str, naming: Naming
) -> Iterator[ExportedFile]:
    """Write whole tensors to files below `out`. One tensor at one moment is in memory, with one of its parts.

    Args:
        run_id: The run.
        chosen: The tensors. No part of them is missing (`LogicalSeries.shape` has checked it).
        out: The directory. Each quant type has one in it.
        to: "pt" or "npz".
        naming: The names of .pt files.

    Yields:
        Each file when it is whole.

    Raises:
        CapdError: If a file exists, or the parts of a tensor do not fit together.
        StoreBusy: If another export writes to `out`.
        DamagedRecord: If a record cannot be read exactly.
        OSError: If a file cannot be written.
    """
    with locked_directory(out):
        counters: Counter[Path] = Counter()
        for one in chosen:
            directory = out / component(one.key.quant_type)
            directory.mkdir(exist_ok=True)
            if to == "npz":
                yield _archive(run_id, one, directory / f"{component(one.name)}.npz")
                continue
            for moment in one.moments:
                counters[directory] += 1
                yield _file(run_id, one, moment, directory, counters[directory], naming)


def described_whole(one: LogicalSeries) -> dict[str, Any]:
    """Return what a whole tensor is, and from which parts it is put together, as plain values."""
    return {
        "name": one.name,
        "module": one.key.module,
        "coordinates": one.coordinates,
        "dtype": one.dtype,
        "part_dtype": one.part_dtype,
        "placements": one.placements,
        "attributes": msgspec.to_builtins(one.attributes),
        "parts": [part._asdict() for part in one.parts],
    }


def _file(
    run_id: str, one: LogicalSeries, moment: Moment, directory: Path, counter: int, naming: Naming
) -> ExportedFile:
    bits = one.numpy(moment)
    found = {
        "tensor": tensor_of(bits, one.dtype),
        "tensor_info": {
            "shape": list(bits.shape),
            "dtype": f"torch.{one.dtype}",
            "device": "cpu",
            "requires_grad": False,
            "is_leaf": True,
            **saved_statistics(bits, one.dtype, None),
        },
        "metadata": {
            **standard_metadata(one.key, moment, naming),
            "logical": {"run": run_id, **described_whole(one)},
        },
    }
    name = file_name(
        naming.scheme, naming.shown(one.key), moment, naming.layer(one.key), stamp_of(moment.time_ns), counter
    )
    nbytes = write_new(directory / name, partial(save_object, found))
    return ExportedFile(directory / name, nbytes, 1, bits.nbytes)


def _archive(run_id: str, one: LogicalSeries, path: Path) -> ExportedFile:
    sizes: list[int] = []
    write = partial(_write_archive, run_id=run_id, one=one, sizes=sizes)
    return ExportedFile(path, write_new(path, write), len(one), sum(sizes))


def _write_archive(file: BinaryIO, run_id: str, one: LogicalSeries, sizes: list[int]) -> None:
    records = [
        {"record": number, "shape": list(one.shape(moment)), **msgspec.structs.asdict(moment)}
        for number, moment in enumerate(one.moments)
    ]
    document = {
        "format": _FORMAT,
        "run": run_id,
        "logical": described_whole(one),
        "key": msgspec.to_builtins(one.key),
        "records": records,
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        add_npy(archive, "capd", np.array(json.dumps(document)))
        for number, moment in enumerate(one.moments):
            bits = one.numpy(moment)
            sizes.append(bits.nbytes)
            add_npy(archive, str(number), bits)
