"""The job's own quantisers, as far as its modules and imports show them. If there is one, capd must not quantise.

Nothing is run or imported to find out. If a job's quantiser leaves no trace here, its owner names it with `capd run
--label-only`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, Optional

from torch import nn
from torch.nn import functional

from capd_client.integrations.callers import calls
from capd_client.integrations.transformer_engine import autocast_state

__all__ = ["TENSOR_SAVER", "own_quantiser"]

TENSOR_SAVER = "names its quant types itself, by tensor_saver's calls (save_tensor, …)"

_TENSOR_SAVERS = ("capd_client.tensor_saver", "megatron.core.tensor_saver")
_CALLS = ("save_tensor", "save_linear_tensors", "save_attention_tensors")
_LIBRARIES = frozenset(
    {"torchao", "transformer_engine", "bitsandbytes", "modelopt", "mx", "msamp", "torch_npu"}
)


def own_quantiser(models: Iterable[nn.Module]) -> Optional[str]:
    """Return the quantiser of a job with these models, in words that follow "the job". None if none is known."""
    return next(_reasons(tuple(models)), None)


def _reasons(models: tuple[nn.Module, ...]) -> Iterator[str]:
    if any(name in sys.modules for name in _TENSOR_SAVERS):
        yield TENSOR_SAVER
    if _is_of_library(type(functional.linear)) or _root_of(functional.linear) in _LIBRARIES:
        yield f"has F.linear replaced by {_root_of(functional.linear)}"
    if autocast_state() is not None:
        yield "trains under TransformerEngine's FP8 autocast"
    kinds: set[type] = set()
    for model in models:
        for name, module in model.named_modules():
            reason = _reason_of(module)
            if reason:
                yield f"has {reason} ({name or type(module).__name__})"
            kinds.add(type(module))
    if any(calls(kind, name) for kind in kinds for name in _CALLS):
        yield TENSOR_SAVER


def _reason_of(module: nn.Module) -> Optional[str]:
    """Return the quantiser of a module itself. Inner modules are asked separately."""
    if isinstance(module, nn.Linear) and _is_of_library(type(module)):
        return f"{_root_of(type(module))}'s {type(module).__name__}"
    for parameter in module.parameters(recurse=False):
        held = getattr(parameter, "data", parameter)
        kind = next((kind for kind in (type(parameter), type(held)) if _is_of_library(kind)), None)
        if kind is not None:
            return f"weights that are {_root_of(kind)}'s {kind.__name__}"
    config = getattr(module, "config", None)
    # The first three names are Megatron's, the last is transformers'.
    for name in ("fp8", "fp4", "quant_recipe", "quantization_config"):
        value = _member(config, name)
        if value:
            return f"{name} in its configuration"
    return None


def _member(config: Any, name: str) -> Any:
    """Return a value that the configuration itself holds. Some configurations answer every attribute name."""
    try:
        return vars(config).get(name)
    except TypeError:
        # The configuration has no dictionary.
        return None


def _is_of_library(kind: type) -> bool:
    return any(_root_of(base) in _LIBRARIES for base in kind.__mro__)


def _root_of(value: Any) -> str:
    return str(getattr(value, "__module__", "") or "").partition(".")[0]
