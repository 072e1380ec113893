"""Reads files of sglang's dumper into a run.

A file that capd wrote becomes the same record again. Of any other file, the tags of its name and its "meta" give the
key: `step` is the iteration, `name` the module and the tensor, `layer_id` the layer. Placements come from `dims` and
the parallel info. Other tags and facts are kept as metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capd.exchange.quant_types import quant_type_of
from capd.exchange.sglang.dims import placements_in
from capd.pt_files.dictionary import Capture, foreign_capture
from capd.pt_files.files import TensorFile, find_files
from capd.pt_files.import_ import Outcome, bits_of
from capd.pt_files.load import load_tensor_file, opened
from capd.pt_files.pickle_scan import BadTensorFile
from capd.pt_files.writer import ImportedRecord

__all__ = ["SglangFile", "sglang_files"]

_TAG = re.compile(r"([A-Za-z_]\w{0,63})=(.{0,400})\Z", re.DOTALL)
_INFO = ("sglang_parallel_info", "megatron_parallel_info")
# Tags and facts that the key, the moment or the attributes have.
_KNOWN = (
    "step",
    "rank",
    "name",
    "layer_id",
    "micro_batch",
    "call",
    "quant_type",
    "dims",
    "world_rank",
    "capd",
    *_INFO,
)
_NAME = re.compile(r"step=\d+___rank=\d+___dump_index=\d+___.*\.pt\Z", re.DOTALL)


def sglang_files(root: Path) -> list[SglangFile]:
    """Return the dumper's files below `root`, in the order of rank and index. Raises OSError if it cannot be read."""
    found = [SglangFile(file) for file in find_files(root) if _NAME.match(file.file_name)]
    return sorted(found, key=lambda one: (str(one.file.directory), one.order))


@dataclass(frozen=True, slots=True)
class SglangFile:
    """A file of the dumper."""

    file: TensorFile

    @property
    def tags(self) -> dict[str, str]:
        """The tags of the file's name."""
        parts = self.file.file_name.removesuffix(".pt").split("___")
        return {match[1]: match[2] for part in parts if (match := _TAG.match(part))}

    @property
    def order(self) -> tuple[int, int]:
        """The rank, and the number of the dump in it."""
        tags = self.tags
        return _number(tags.get("rank")) or 0, _number(tags.get("dump_index")) or 0

    def read(self) -> Iterator[ImportedRecord | Outcome]:
        """Yield the tensor of the file. Raises BadTensorFile if it is none of the dumper's, OSError if unreadable."""
        import torch

        with opened(self.file.path) as stream:
            found = load_tensor_file(stream)
        value, meta = (found.get("value"), found.get("meta")) if isinstance(found, dict) else (found, {})
        if not isinstance(value, torch.Tensor):
            raise BadTensorFile(f"its value is no tensor but {type(value).__name__}")
        if not isinstance(meta, dict):
            raise BadTensorFile('its "meta" is no dictionary')
        dtype, bits = bits_of(value)
        yield ImportedRecord(self.file, _capture(self.tags, meta, dtype), dtype, bits)


def _capture(tags: Mapping[str, str], meta: Mapping[Any, Any], dtype: str) -> Capture:
    own = meta.get("capd")
    if isinstance(own, dict):
        found = [own.get(name) for name in ("key", "moment", "attributes", "metadata")]
        parts: list[dict[str, Any]] = [part for part in found if isinstance(part, dict)]
        if len(parts) < len(found):
            raise BadTensorFile('its meta["capd"] does not name a record')
        return foreign_capture(*parts)
    said = {**tags, **{str(name): value for name, value in meta.items()}}
    module, _, tensor = str(said.get("name", "")).rpartition(".")
    numbers = {name: _stated(said, name) for name in ("step", "rank", "layer_id", "micro_batch", "call")}
    key: dict[str, Any] = {
        "quant_type": str(said.get("quant_type") or quant_type_of(dtype)),
        "rank": numbers["rank"] or 0,
        "tensor_name": tensor or "unnamed",
        "module": module,
        "operation": "backward"
        if tensor.endswith(("grad", "_grad")) or tensor.startswith("grad")
        else "forward",
    }
    if numbers["layer_id"] is not None:
        key["layer"] = numbers["layer_id"]
    moment = {"iteration": numbers["step"] or 0}
    moment |= {name: number for name in ("micro_batch", "call") if (number := numbers[name]) is not None}
    info: dict[Any, Any] = next((said[name] for name in _INFO if isinstance(said.get(name), dict)), {})
    try:
        attributes = placements_in(str(said.get("dims", "")), info)
    except ValueError as error:
        raise BadTensorFile(f"its dims {str(said.get('dims'))[:100]!r} cannot be read: {error}") from None
    return foreign_capture(key, moment, attributes, {n: v for n, v in said.items() if n not in _KNOWN})


def _stated(said: Mapping[str, Any], name: str) -> int | None:
    """Return the number that a file states, None if it states none."""
    value = said.get(name)
    number = _number(value)
    if number is None and value is not None:
        raise BadTensorFile(
            f"its {name} {str(value)[:40]!r} is no whole number from 0 on, of at most 18 digits"
        )
    return number


def _number(value: Any) -> int | None:
    """Return a whole number of at most 18 digits that is not negative, from a tag or from the file."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if 0 <= value < 10**18 else None
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value) else None
