"""The perturbation that CAPD_PERTURB requests: the first numbers of a model times 1 ± eps, to measure rounding.

A run whose input differs by rounding alone shows how far rounding spreads to each tensor. The sign of each element
is drawn from a generator that is seeded alike on all ranks, so replicas stay equal.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Perturbation", "perturb"]

_perturbed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Perturbation(NamedTuple):
    """A relative change and the seed of its signs, as in "1e-7:3"."""

    eps: float
    seed: int = 0

    @classmethod
    def of(cls, text: str) -> Perturbation:
        """Read the checked text of CAPD_PERTURB (`capd_client.config.values.perturbation`)."""
        eps, _, seed = text.partition(":")
        return cls(float(eps), int(seed or 0))

    def signs(self, shape: Sequence[int], call: int) -> Tensor:
        """Return +1.0 and -1.0 of this shape on the CPU, the same in every process for the same call."""
        # The generator reads the low 32 bits alone.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + call) % 2**32)
        return torch.randint(0, 2, tuple(shape), generator=generator).mul_(2).sub_(1).float()


def perturb(models: Sequence[nn.Module], text: str) -> list[Callable[[], None]]:
    """Multiply the output of each model's embedding by 1 ± eps from now on; without one, its floating-point inputs.

    Args:
        models: The models. One that is perturbed already is left alone, so that no number is changed twice.
        text: The setting, as in "1e-7:3".

    Returns:
        The functions that end it.
    """
    change = Perturbation.of(text)
    ends: list[Callable[[], None]] = []
    for model in models:
        if model in _perturbed:
            continue
        _perturbed.add(model)
        embedding = next((one for one in model.modules() if _is_embedding(one)), None)
        hook = _Hook(change)
        handle = (
            model.register_forward_pre_hook(hook.before, with_kwargs=True)
            if embedding is None
            else embedding.register_forward_hook(hook.after)
        )
        ends += [handle.remove, lambda model=model: _perturbed.discard(model)]  # type: ignore[misc]
    return ends


def _is_embedding(module: nn.Module) -> bool:
    # Megatron's VocabParallelEmbedding is no nn.Embedding. Rotary embeddings have no table.
    name = type(module).__name__
    table = getattr(module, "weight", None)
    return isinstance(module, nn.Embedding) or (name.endswith("Embedding") and isinstance(table, Tensor))


class _Hook:
    """Changes the tensors of each call. Calls are counted, so each draws other signs."""

    def __init__(self, change: Perturbation) -> None:
        self._change, self._calls = change, 0

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._changed(output)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(self._changed, args)), {name: self._changed(one) for name, one in kwargs.items()}

    def _changed(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        signs = self._change.signs(value.shape, self._calls).to(value.device)
        self._calls += 1
        # In float32 at least, or 1 + eps would be 1 in bfloat16.
        wide = value if value.dtype == torch.float64 else value.float()
        return (wide * (1 + signs.to(wide.dtype) * self._change.eps)).to(value.dtype)
