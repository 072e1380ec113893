"""The layers of a Megatron pipeline: from a layer's number within a chunk to its number in the model."""

from __future__ import annotations

import re
from dataclasses import dataclass

from capd.errors import ConfigError
from capd.pt_files.pickle_scan import BadTensorFile

__all__ = ["PipelineLayout"]

_LAYER = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?P<number>\d{1,9})(?P<after>(?:\..*)?)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """A pipeline whose chunks all have the same number of layers.

    Attributes:
        stages: The pipeline's ranks, `--pipeline-model-parallel-size`.
        chunks: The model chunks of a rank: 1, or the size of the virtual pipeline.
        layers: The layers of the whole model. 0 is unknown, which only one stage with one chunk can be.
    """

    stages: int = 1
    chunks: int = 1
    layers: int = 0

    def __post_init__(self) -> None:
        if self.stages * self.chunks > 1 and (not self.layers or self.layers % (self.stages * self.chunks)):
            raise ConfigError(
                f"{self.layers or 'an unknown number of'} layers do not fill {self.stages} stages of {self.chunks} "
                "chunks evenly; give --layers of the whole model. Uneven stages cannot be imported"
            )

    def offset(self, stage: int, chunk: int) -> int:
        """Return the number of the first layer of a chunk in the model.

        Chunk v of stage p is the part v * stages + p of the model. Source: Megatron-LM,
        `megatron/core/transformer/transformer_layer.py`, get_transformer_layer_offset.
        """
        return (chunk * self.stages + stage) * (self.layers // (self.stages * self.chunks))

    def placed(self, module: str, stage: int, chunk: int) -> tuple[str, int | None, str]:
        """Return a module's name in the model, its layer, and the name before its layers (encoder, decoder).

        Raises:
            BadTensorFile: The chunk has no such layer.
        """
        match = _LAYER.match(module)
        if match is None:
            return module, None, ""
        own = self.layers // (self.stages * self.chunks)
        if self.layers and int(match["number"]) >= own:
            raise BadTensorFile(
                f"it is in layer {int(match['number'])} of a chunk, and --layers, --pp and --vpp give chunks of {own}"
            )
        layer = int(match["number"]) + self.offset(stage, chunk)
        before = match["before"].removesuffix("layers.").rstrip(".")
        return f"{match['before']}{layer}{match['after']}", layer, before.rpartition(".")[2]
