"""Made-up words for torchtitan: its own datasets lie outside of its package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from tests.integration.frameworks.torchtitan_job import VOCABULARY


class Tokens(BaseTokenizer):
    """A tokenizer that nobody asks for anything."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Words(BaseDataLoader):
    """Batches without end, other ones on every data parallel rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self._generator = torch.Generator().manual_seed(dp_rank)
        self._shape = (local_batch_size, seq_len + 1)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        rows, tokens = self._shape
        while True:
            words = torch.randint(VOCABULARY, self._shape, generator=self._generator)
            positions = torch.arange(tokens - 1).expand(rows, -1)
            yield {"input": words[:, :-1], "positions": positions}, words[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
