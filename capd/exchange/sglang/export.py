"""Writes records as files of sglang's dumper, which its comparator compares.

    python -m sglang.srt.debug_utils.comparator --baseline-path A/RUN --target-path B/RUN

A file is `torch.save` of {"value": tensor, "meta": {…}}. Its name has the tags by which the comparator pairs tensors:
step, module, tensor, layer, micro-batch and call. Parts of one tensor have the same tags but for the rank, and the
comparator joins them by `dims`. Where several ranks have a tensor and nothing says how their parts belong together,
the files have no `dims`. Source: sglang 0.5.23, `debug_utils/dumper.py` and `debug_utils/dump_loader.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from capd.errors import ContradictoryParts
from capd.exchange.peers import ExportRequest
from capd.exchange.sglang.dims import ParallelPlace, dims_of
from capd.exchange.sglang.parts import KnownParts, NamedTensor
from capd.output_directory import ExportedFile, locked_directory, write_new
from capd.pt_files.export import save_object
from capd.store.documents.names import component
from capd.store.logical.identity import is_parameter, logical_module
from capd.store.read.series import Record, Series
from capd_client.protocol.key import Key, Moment

__all__ = ["export_files", "file_name"]

_MOST_FILE_NAME_CHARS = 255
_MOST_NAME_CHARS = 96
_MOST_QUANT_TYPE_CHARS = 24
_LONGEST_RANK, _LONGEST_INDEX = "9" * 6, "9" * 9
_HASH_CHARS = 9
_UNRELATED = (
    "say nothing of how the parts of their ranks belong together, so their files do not either. sglang's comparator "
    "skips them; with --preset raw it compares rank by rank"
)
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:\-]+|_{3,}")


def export_files(request: ExportRequest) -> Iterator[ExportedFile]:
    """Write the records of series that keep tensors to files below `out`/RUN, in the order of their capture.

    Quantised parts and packed values are written as they are stored. A record whose placement the comparator has no
    word for is left out and counted. Records of tensors whose parts are not known to belong together have no `dims`,
    and are counted in `request.remarks`. One record is in memory at once.

    Yields:
        Each file when it is whole.

    Raises:
        StoreBusy: Another export writes to `out`.
        DamagedRecord: A record cannot be read exactly.
        OSError: A file cannot be written.
    """
    run_id, chosen, out = request.run_id, request.chosen, request.out
    with locked_directory(out):
        directory = out / component(run_id)
        directory.mkdir(exist_ok=True)
        parts = _known_parts(chosen)
        indices: Counter[int] = Counter()
        world = 1 + max(series.key.rank for series in chosen)
        for series in chosen:
            reading = series.fresh()
            for record in reading.records:
                place = _place(series.key, record)
                if place.problem:
                    request.leave_out(f"sglang's comparator: {place.problem}")
                    continue
                if not parts.are_related(_named(series.key, record, place)):
                    request.remarks[_UNRELATED] += 1
                    # Without dims it must have no info: the comparator would take ranks of "dp" for empty ones.
                    place = place._replace(dims="", info={})
                indices[series.key.rank] += 1
                name = file_name(series.key, record, place, indices[series.key.rank])
                if len(name.encode()) > _MOST_FILE_NAME_CHARS:
                    request.leave_out("their numbers do not fit into a file's name")
                    continue
                path = directory / name
                value = reading.tensor(record.index)
                meta = _meta(run_id, reading, record, place, world)
                nbytes = write_new(path, partial(save_object, {"value": value, "meta": meta}))
                yield ExportedFile(path, nbytes, 1, value.numel() * value.element_size())


def _known_parts(chosen: Sequence[Series]) -> KnownParts:
    parts = KnownParts()
    for series in chosen:
        for record in series.fresh().records:
            place = _place(series.key, record)
            if not place.problem:
                parts.add(_named(series.key, record, place), place, series.key.rank)
    return parts


def _place(key: Key, record: Record) -> ParallelPlace:
    try:
        logical_module(key.module, record.attributes)
    except ContradictoryParts as error:
        return ParallelPlace("", {}, {}, f"the attributes contradict each other: {error}")
    of = msgspec.structs.replace(key, tensor_name=key.tensor_name.removeprefix("grad_"))
    return dims_of(record.attributes, len(record.shape), of_tokens=not is_parameter(of))


def _named(key: Key, record: Record, place: ParallelPlace) -> NamedTensor:
    tags = tuple(sorted(place.tags.items()))
    return NamedTensor(_tensor_name(key, record), key.layer, key.quant_type, tags, len(record.shape))


def file_name(key: Key, record: Record, place: ParallelPlace, index: int) -> str:
    """Return the name of a record's file. Two records of one rank never share a name, as `index` differs."""
    tags: dict[str, Any] = {"step": record.iteration, "rank": key.rank, "dump_index": index, "name": ""}
    if key.layer is not None:
        tags["layer_id"] = key.layer
    tags |= {"micro_batch": record.micro_batch, "call": record.call}
    tags |= {"quant_type": _safe(key.quant_type, _MOST_QUANT_TYPE_CHARS), **place.tags}
    # A name that depended on the rank or the index would not be the same for all parts.
    others = len(_joined({**tags, "rank": _LONGEST_RANK, "dump_index": _LONGEST_INDEX}))
    tags["name"] = _safe(_tensor_name(key, record), min(_MOST_NAME_CHARS, _MOST_FILE_NAME_CHARS - others))
    return _joined(tags)


def _joined(tags: Mapping[str, Any]) -> str:
    return "___".join(f"{name}={value}" for name, value in tags.items()) + ".pt"


def _tensor_name(key: Key, record: Record) -> str:
    """Return stack, module, operation and tensor. The module of an expert has its number over all ranks."""
    module = logical_module(key.module, record.attributes) or ".".join(
        filter(None, (key.layer_type, key.component))
    )
    return ".".join(filter(None, (key.stack, module, key.operation, key.tensor_name)))


def _safe(text: str, most_chars: int) -> str:
    """Return a text for a tag. One that had to be changed ends with a hash, so that others never get the same."""
    safe = _UNSAFE.sub("_", text).strip("_")
    if text and safe == text and len(text) <= most_chars:
        return text
    # The end of a module's name tells more than its beginning.
    kept = safe[-max(1, most_chars - _HASH_CHARS) :].lstrip("_")
    return f"{kept}_{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}".lstrip("_")


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
