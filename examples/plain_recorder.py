"""Records the same tensors as capd does in `train_text.py`, by plain hooks and `torch.save`, without capd.

It is what tests compare a store with: for every captured step, each Linear's input and weight in the dtype its
product used, its output and the gradient of its output, and the same of each attention's query, key and value. The file
holds a list of (module, tensor_name, iteration, micro_batch, tensor). It keeps everything in memory until `save`, so
it is for short runs.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Entry = tuple[str, str, int, int, Tensor]


class PlainRecorder:
    """Clones the tensors of `model` while `at` has named a step in `steps`; `save` writes them to `path`."""

    def __init__(self, model: nn.Module, steps: Container[int], path: Path) -> None:
        self._steps = steps
        self._path = path
        self._at = (-1, -1)
        self._entries: list[Entry] = []
        self._attention = ""  # the attention module that is running
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                self._hook_linear(name, module)
            elif name.endswith(".attention"):
                self._hook_attention(name, module)
        self._plain_attention = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self._recorded_attention

    def at(self, iteration: int, micro_batch: int) -> None:
        """Names the micro-batch whose forward comes next."""
        self._at = (iteration, micro_batch)

    def save(self) -> None:
        """Write everything recorded."""
        F.scaled_dot_product_attention = self._plain_attention
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self._entries, self._path)

    def _record(self, module: str, tensor_name: str, tensor: Tensor, at: tuple[int, int]) -> None:
        if at[0] in self._steps:
            self._entries.append(
                (module, tensor_name, *at, tensor.detach().clone(memory_format=torch.contiguous_format))
            )

    def _record_gradient(self, module: str, output: Tensor, at: tuple[int, int]) -> None:
        output.register_hook(lambda gradient: self._record(module, "grad_output", gradient, at))

    def _hook_linear(self, name: str, linear: nn.Linear) -> None:
        def after(module: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
            at = self._at
            self._record(name, "input", args[0].to(output.dtype), at)  # autocast gives all operands one dtype
            if at[1] == 0:
                self._record(name, "weight", module.weight.to(output.dtype), at)
            self._record(name, "output", output, at)
            self._record_gradient(name, output, at)

        linear.register_forward_hook(after)

    def _hook_attention(self, name: str, attention: nn.Module) -> None:
        def before(module: nn.Module, args: Any) -> None:
            self._attention = name

        attention.register_forward_pre_hook(before)

    def _recorded_attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        name, at = self._attention, self._at
        for tensor_name, tensor in (("query", query), ("key", key), ("value", value)):
            self._record(name, tensor_name, tensor, at)
        output = self._plain_attention(query, key, value, **options)
        self._record(name, "output", output, at)
        self._record_gradient(name, output, at)
        return output
