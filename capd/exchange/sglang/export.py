"""Writes records as files of sglang's dumper, which its comparator compares.

    python -m sglang.srt.debug_utils.comparator --baseline-path A/RUN --target-path B/RUN

A file is `torch.save` of {"value": tensor, "meta": {…}}. Its name has the tags by which the comparator pairs tensors:
step, module, tensor, layer, micro-batch and call. Parts of one tensor have the same tags but for the rank, and the
comparator joins them by `dims`. Source: sglang 0.5.23, `debug_utils/dumper.py` and `debug_utils/dump_loader.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from capd.exchange.peers import ExportRequest
from capd.exchange.sglang.dims import ParallelPlace, dims_of
from capd.output_directory import ExportedFile, locked_directory, write_new
from capd.pt_files.export import save_object
from capd.store.documents.names import component
from capd.store.read.series import Record, Series
from capd_client.protocol.key import Key, Moment

__all__ = ["export_files", "file_name"]

# A file system's longest name, less the temporary one's ending.
_MOST_NAME_BYTES = 240
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:\-]+|_{3,}")


def export_files(request: ExportRequest) -> Iterator[ExportedFile]:
    """Write the records of series that keep tensors to files below `out`/RUN, in the order of their capture.

    Quantised parts and packed values are written as they are stored. A record whose placement the comparator has no
    word for is left out and counted in `request.left_out`. One record is in memory at once.

    Yields:
        Each file when it is whole.

    Raises:
        StoreBusy: Another export writes to `out`.
        DamagedRecord: A record cannot be read exactly.
        OSError: A file cannot be written.
    """
    run_id, chosen, out, left_out = request.run_id, request.chosen, request.out, request.left_out
    with locked_directory(out):
        directory = out / component(run_id)
        directory.mkdir(exist_ok=True)
        indices: Counter[int] = Counter()
        world = 1 + max(series.key.rank for series in chosen)
        for series in chosen:
            reading = series.fresh()
            for record in reading.records:
                place = dims_of(record.attributes, len(record.shape))
                if place.problem:
                    left_out[f"sglang's comparator: {place.problem}"] += 1
                    continue
                indices[series.key.rank] += 1
                path = directory / file_name(series.key, record, place, indices[series.key.rank])
                value = reading.tensor(record.index)
                meta = _meta(run_id, reading, record, place, world)
                nbytes = write_new(path, partial(save_object, {"value": value, "meta": meta}))
                yield ExportedFile(path, nbytes, 1, value.numel() * value.element_size())


def file_name(key: Key, record: Record, place: ParallelPlace, index: int) -> str:
    """Return the name of a record's file. Two records of one rank never share a name, as `index` differs."""
    tags: dict[str, Any] = {
        "step": record.iteration,
        "rank": key.rank,
        "dump_index": index,
        "name": _safe(".".join(filter(None, (key.stack, key.module, key.operation, key.tensor_name)))),
    }
    if key.layer is not None:
        tags["layer_id"] = key.layer
    tags |= {
        "micro_batch": record.micro_batch,
        "call": record.call,
        "quant_type": _safe(key.quant_type),
        **place.tags,
    }
    text = "___".join(f"{name}={value}" for name, value in tags.items())
    if len(text.encode()) > _MOST_NAME_BYTES:
        # The end of a module's name tells more than its beginning.
        over = len(text.encode()) - _MOST_NAME_BYTES
        tags["name"] = tags["name"][over:].lstrip("_")
        text = "___".join(f"{name}={value}" for name, value in tags.items())
    return f"{text}.pt"


def _safe(text: str) -> str:
    return _UNSAFE.sub("_", text).strip("_") or "unnamed"


def _meta(run_id: str, series: Series, record: Record, place: ParallelPlace, world: int) -> dict[str, Any]:
    moment = {name: getattr(record, name) for name in Moment.__struct_fields__}
    meta: dict[str, Any] = {
        "world_rank": series.key.rank,
        "world_size": world,
        "capd": {
            "run": run_id, "key": msgspec.to_builtins(series.key), "moment": moment,
            "attributes": dict(record.attributes), "metadata": dict(record.metadata),
        },
    }  # fmt: skip
    if place.dims:
        meta["dims"] = place.dims
    if place.info:
        meta["megatron_parallel_info"] = place.info
    return meta
