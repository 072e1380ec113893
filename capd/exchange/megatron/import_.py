"""Reads the files of Megatron-LM's `--save-activations`, `--save-dgrads` and `--save-wgrads` into a run.

SAVE/{activations,dgrads,wgrads}/iter_0000010/mp_rank_TT[_PPP][_EEE].pth has a dictionary of tensors for each chunk.
TT, PPP and EEE are the ranks of tensor, pipeline and expert parallelism. Layers count from 0 in each chunk. Only the
ranks with data-parallel rank 0 write, and only their last micro-batch. Source: Megatron-LM at d98e8a6 (2026-08-22).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from capd.exchange.megatron.layers import PipelineLayout
from capd.exchange.quant_types import quant_type_of
from capd.pt_files.dictionary import foreign_capture
from capd.pt_files.files import TensorFile, find_files
from capd.pt_files.import_ import Outcome, bits_of
from capd.pt_files.load import load_tensor_file, opened
from capd.pt_files.pickle_scan import BadTensorFile
from capd.pt_files.writer import ImportedRecord

__all__ = ["MegatronFile", "megatron_files"]

KINDS = {"activations": "forward", "dgrads": "backward", "wgrads": "backward"}
_ITERATION = re.compile(r"iter_(\d{7,12})\Z")
_RANKS = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?(?:_(\d{3,5}))?\.pth\Z")
_CHUNK = re.compile(r"model_chunk(\d{1,4})\Z")
# The name of a tensor ends with what it is to its module.
_TENSORS = {
    "activations": {"input0": "input", "output0": "output"},
    "dgrads": {"input0": "grad_input", "output0": "grad_output"},
}
_MOST_TENSORS = 100_000


def megatron_files(root: Path, pipeline: PipelineLayout) -> list[MegatronFile]:
    """Return the files below `root` in the order of kind, iteration and ranks. Raises OSError if it cannot be read."""
    found = [one for file in find_files(root) if (one := _megatron_file(file, pipeline)) is not None]
    tp, pp, ep = (1 + max((one.ranks[axis] for one in found), default=0) for axis in range(3))
    found = [replace(one, sizes=(tp, pp, ep)) for one in found]
    return sorted(found, key=lambda one: (one.kind, one.iteration, one.ranks))


def _megatron_file(file: TensorFile, pipeline: PipelineLayout) -> MegatronFile | None:
    iteration, ranks = _ITERATION.match(file.directory.name), _RANKS.match(file.file_name)
    kind = file.directory.parent.name
    if iteration is None or ranks is None or kind not in KINDS:
        return None
    # Without a pipeline the second number is the expert's rank.
    tp, second, third = (None if text is None else int(text) for text in ranks.groups())
    pp, ep = (second, third) if pipeline.stages > 1 or third is not None else (None, second)
    return MegatronFile(file, kind, int(iteration[1]), (tp or 0, pp or 0, ep or 0), pipeline)


@dataclass(frozen=True, slots=True)
class MegatronFile:
    """A file of one rank and iteration.

    Attributes:
        kind: activations, dgrads or wgrads.
        ranks: The ranks of tensor, pipeline and expert parallelism.
        sizes: How many ranks of each wrote files.
    """

    file: TensorFile
    kind: str
    iteration: int
    ranks: tuple[int, int, int]
    pipeline: PipelineLayout
    sizes: tuple[int, int, int] = (1, 1, 1)

    def read(self) -> Iterator[ImportedRecord | Outcome]:
        """Yield the tensors of the file, and the reason for each value that is none.

        Raises:
            BadTensorFile: It is no such file.
            OSError: It cannot be read.
        """
        stage = self.ranks[1]
        if stage >= self.pipeline.stages:
            raise BadTensorFile(
                f"it is of stage {stage} of the pipeline; give --pp {stage + 1} or more, and --layers"
            )
        with opened(self.file.path) as stream:
            found = load_tensor_file(stream)
        chunks = {match: value for name, value in _items(found) if (match := _CHUNK.match(name))}
        if not chunks:
            raise BadTensorFile(
                'it has no "model_chunk0", so it is not of --save-activations, --save-dgrads or --save-wgrads'
            )
        for match, tensors in chunks.items():
            chunk = int(match[1])
            if chunk >= self.pipeline.chunks:
                raise BadTensorFile(
                    f"it has model chunk {chunk}; give --vpp {chunk + 1} or more, and --layers"
                )
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
        for name, rank, size in zip(("tp", "pp", "ep"), self.ranks, sizes, strict=True):
            attributes |= {f"{name}_rank": rank, f"{name}_size": size}
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
