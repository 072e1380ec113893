"""A plain recorder of the tensors that capd captures in `train_text.py`, by hooks and `torch.save`, without capd.

Tests compare a store with its file. For every captured step it records each Linear's input and weight, in the dtype
of the product. It also records the output and the output's gradient. For each attention it records query, key and
value, the output and the output's gradient.

The file holds a list of (module, tensor_name, iteration, micro_batch, tensor). All tensors stay in memory until
`save`, so the recorder is for short runs.
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
    """A recorder that clones the tensors of `model` while `at` names a step in `steps`.

    `save` writes them to `path`.
    """

    def __init__(self, model: nn.Module, steps: Container[int], path: Path) -> None:
        self._steps = steps
        self._path = path
        self._at = (-1, -1)
        self._entries: list[Entry] = []
        # The name of the attention module that is running.
        self._attention = ""
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                self._hook_linear(name, module)
            elif name.endswith(".attention"):
                self._hook_attention(name, module)
        self._plain_attention = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = self._recorded_attention

    def at(self, iteration: int, micro_batch: int) -> None:
        """Name the micro-batch whose forward comes next."""
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
            # Under autocast all operands have one dtype.
            self._record(name, "input", args[0].to(output.dtype), at)
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
