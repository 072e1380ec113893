"""The baselines of capd: hooks that do nothing, hooks that copy, and hooks that save at once as tensor_saver did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class PlainHooks:
    """The cheapest correct hooks that pass X, Y, dY and dX of every Linear to `take`."""

    def __init__(self, model: nn.Module, take: Callable[[Tensor], None] | None) -> None:
        self._handles = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                before, after = self._hooks(take or (lambda tensor: None))
                self._handles.append(module.register_forward_pre_hook(before))
                self._handles.append(module.register_forward_hook(after))

    @staticmethod
    def _hooks(take: Callable[[Tensor], None]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def gradient(tensor: Tensor) -> None:
            take(tensor)

        def before(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            take(args[0])
            alias = args[0].view_as(args[0])
            alias.register_hook(gradient)
            return (alias,)

        def after(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            take(output)
            output.register_hook(gradient)

        return before, after

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class Ring:
    """A preallocated buffer that is overwritten cyclically: the lowest cost of any snapshot."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = torch.zeros(nbytes, dtype=torch.uint8)
        self._offset = 0

    def copy(self, tensor: Tensor) -> None:
        if self._offset + tensor.nbytes > self._buffer.nbytes:
            self._offset = 0
        slot = self._buffer[self._offset : self._offset + tensor.nbytes]
        slot.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        self._offset += tensor.nbytes + (-tensor.nbytes) % 64


class SynchronousSaver:
    """tensor_saver's method: bring the tensor to the host, four statistics, one torch.save per tensor."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0

    def save(self, tensor: Tensor) -> None:
        host = tensor.detach().cpu()
        statistics_ = {
            "min": host.min().item(), "max": host.max().item(), "mean": host.mean().item(), "std": host.std().item()
        }  # fmt: skip
        self._count += 1
        torch.save({"tensor": host, "statistics": statistics_}, self._directory / f"{self._count}.pt")

    def clear(self) -> None:
        """Delete the saved files. The disk is not measured."""
        for path in self._directory.iterdir():
            path.unlink()
