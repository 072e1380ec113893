"""Reads the files of Megatron-LM's `--save-activations`, `--save-dgrads` and `--save-wgrads` into a run.

SAVE/{activations,dgrads,wgrads}/iter_0000010/mp_rank_TT[_PPP][_EEE].pth has a dictionary of tensors for each chunk.
TT, PPP and EEE are the ranks of tensor, pipeline and expert parallelism. Layers count from 0 in each chunk. Only the
ranks with data-parallel rank 0 write, and only their last micro-batch. Source: Megatron-LM at d98e8a6 (2026-08-22).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from capd.errors import ConfigError
from capd.exchange.megatron.layers import PipelineLayout
from capd.exchange.megatron.ranks import AxisRanks, AxisSizes, name_numbers, ranks_and_sizes
from capd.exchange.quant_types import quant_type_of
from capd.pt_files.dictionary import foreign_capture
from capd.pt_files.files import TensorFile, find_files
from capd.pt_files.import_ import Outcome, bits_of
from capd.pt_files.load import load_tensor_file, opened
from capd.pt_files.pickle_scan import BadTensorFile
from capd.pt_files.writer import ImportedRecord

__all__ = ["MegatronFile", "megatron_files", "saved_files"]

KINDS = {"activations": "forward", "dgrads": "backward", "wgrads": "backward"}
_ITERATION = re.compile(r"iter_(\d{7,12})\Z")
_CHUNK = re.compile(r"model_chunk(\d{1,4})\Z")
# The name of a tensor ends with what it is to its module.
_TENSORS = {
    "activations": {"input0": "input", "output0": "output"},
    "dgrads": {"input0": "grad_input", "output0": "grad_output"},
}
_MOST_TENSORS = 100_000


def saved_files(root: Path) -> list[TensorFile]:
    """Return the files below `root` that have the names of such files. Raises OSError if it cannot be read."""
    return [
        file for file in find_files(root) if _iteration(file) is not None and name_numbers(file.file_name)
    ]


def megatron_files(
    files: Sequence[TensorFile], sizes: AxisSizes, pipeline: PipelineLayout
) -> list[MegatronFile]:
    """Return what is in files of one job, in the order of kind, iteration and ranks.

    Raises:
        ConfigError: A name can be read in two ways, or the files contradict the sizes or are of several jobs.
    """
    jobs = sorted({file.directory.parent.parent for file in files})
    if len(jobs) > 1:
        raise ConfigError(f"{jobs[0]} and {jobs[1]} are of several jobs; import each by itself")
    names = [name_numbers(file.file_name) or () for file in files]
    ranks, all_sizes = ranks_and_sizes(names, sizes)
    found = [
        MegatronFile(file, file.directory.parent.name, _iteration(file) or 0, own, pipeline, all_sizes)
        for file, own in zip(files, ranks, strict=True)
    ]
    return sorted(found, key=lambda one: (one.kind, one.iteration, one.ranks))


def _iteration(file: TensorFile) -> int | None:
    match = _ITERATION.match(file.directory.name)
    return None if match is None or file.directory.parent.name not in KINDS else int(match[1])


@dataclass(frozen=True, slots=True)
class MegatronFile:
    """A file of one rank and iteration.

    Attributes:
        kind: activations, dgrads or wgrads.
        ranks: The ranks of tensor, pipeline and expert parallelism.
        sizes: The sizes of tensor, pipeline and expert parallelism.
    """

    file: TensorFile
    kind: str
    iteration: int
    ranks: AxisRanks
    pipeline: PipelineLayout
    sizes: tuple[int, int, int]

    def read(self) -> Iterator[ImportedRecord | Outcome]:
        """Yield the tensors of the file, and the reason for each value that is none.

        Raises:
            BadTensorFile: It is no such file.
            OSError: It cannot be read.
        """
        with opened(self.file.path) as stream:
            found = load_tensor_file(stream)
        chunks = {match: value for name, value in _items(found) if (match := _CHUNK.match(name))}
        if not chunks:
            raise BadTensorFile(
                'it has no "model_chunk0", so it is not of --save-activations, --save-dgrads or --save-wgrads'
            )
        numbers = sorted(int(match[1]) for match in chunks)
        if numbers != list(range(self.pipeline.chunks)):
            raise BadTensorFile(
                f"it has {len(chunks)} model chunks, the last with number {numbers[-1]}, and --vpp says "
                f"{self.pipeline.chunks}; give --vpp {numbers[-1] + 1}, and --layers"
            )
        for match, tensors in chunks.items():
            chunk = int(match[1])
            for name, value in _items(tensors):
                yield self._record(chunk, name, value)

    def _record(self, chunk: int, name: str, value: Any) -> ImportedRecord | Outcome:
        import torch

        file = replace(self.file, entry=f"{chunk}/{name}")
        if not isinstance(value, torch.Tensor):
            return Outcome(file, problem=f"{name[:200]}: its value is no tensor but {type(value).__name__}")
        try:
            dtype, bits = bits_of(value)
            key, attributes, metadata = self._names(chunk, name, dtype)
            capture = foreign_capture(key, {"iteration": self.iteration}, attributes, metadata)
        except BadTensorFile as error:
            return Outcome(file, problem=f"{name[:200]}: {error}")
        return ImportedRecord(file, capture, dtype, bits)

    def _names(
        self, chunk: int, name: str, dtype: str
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return the fields of the key, the attributes and the metadata of a tensor."""
        (tp, stage, expert), sizes = self.ranks, self.sizes
        where, _, tensor = name.rpartition("/") if self.kind != "wgrads" else name.rpartition(".")
        module, layer, stack = self.pipeline.placed(where, stage, chunk)
        if self.kind == "wgrads":
            tensor = f"grad_{tensor}"
        key: dict[str, Any] = {
            "quant_type": quant_type_of(dtype),
            # The rank in a job of the same layout without data and context parallelism, in Megatron's order tp-ep-pp.
            "rank": (stage * sizes[2] + expert) * sizes[0] + tp,
            "tensor_name": _TENSORS.get(self.kind, {}).get(tensor, tensor),
            "module": module,
            "stack": stack,
            "operation": KINDS[self.kind],
        }
        if layer is not None:
            key["layer"] = layer
        attributes: dict[str, Any] = {}
        for axis, rank, size in zip(AxisRanks._fields, self.ranks, sizes, strict=True):
            attributes |= {f"{axis}_rank": rank, f"{axis}_size": size}
        return key, attributes, {"megatron_name": name, "micro_batch": "the last of the iteration"}


def _items(found: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(found, Mapping):
        raise BadTensorFile(f"it holds {type(found).__name__} where Megatron writes a dictionary of tensors")
    if len(found) > _MOST_TENSORS:
        raise BadTensorFile(f"it has {len(found):,} entries, more than {_MOST_TENSORS:,}")
    for name, value in found.items():
        if not isinstance(name, str):
            raise BadTensorFile(f"it has an entry whose name is {type(name).__name__}")
        yield name, value
