"""TransformerEngine's modules, as a hook sees them: before the cast to low precision, after the communication.

The operands of a product are made inside the module. `capd_client.te_features()` captures those operands through
TransformerEngine's own inspection. While the inspection runs, it captures the linears, and this module does not.

Written against the sources of 2.0 to 2.20. `megatron.py` handles Megatron's attention on top of TransformerEngine.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from capd_client.hooks.sites import Attributes, Site, operands_of
from capd_client.integrations import megatron_ranks
from capd_client.integrations.attention_facts import of_core, of_core_call
from capd_client.integrations.te_inspection import inspects
from capd_client.protocol.kinds import ATTENTION, LINEAR, Kind

__all__ = ["autocast_state", "find_sites"]

_BLOCK = Kind("mlp", "layernorm_mlp", ("input",))
_GROUPED = Kind("linear", "grouped_linear", ("input",))

_BEFORE_CAST: Attributes = (("operands", "before the cast to low precision"),)
_BEFORE_NORM: Attributes = (("operands", "input before the normalisation"),)
_COLUMN = {"TEColumnParallelLinear", "TELayerNormColumnParallelLinear"}
_ROW = {"TERowParallelLinear"}
_FUSED = "fuse_wgrad_accumulation adds it to main_grad, not to grad; compute grad_outputᵀ · input"
_SPLIT = "it is held in several parameters"
# The file of its state has another name in newer versions.
_STATES = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")


def find_sites(model: nn.Module) -> dict[str, list[Site]]:
    """Return the modules of TransformerEngine in `model`, by their qualified names."""
    if "transformer_engine.pytorch" not in sys.modules:
        return {}
    found = {name: _maker_of(type(module)) for name, module in model.named_modules()}
    sites = {name: make(model.get_submodule(name)) for name, make in found.items() if make is not None}
    common = megatron_ranks.coordinates(model) if "megatron.core.parallel_state" in sys.modules else ()
    if not common:
        return {name: [site] for name, site in sites.items()}
    return {name: [_placed(site, model, name, common)] for name, site in sites.items()}


def _placed(site: Site, model: nn.Module, name: str, common: Attributes) -> Site:
    """Return the site with the rank's place in Megatron's groups, and with the placements of a linear."""
    if site.kind is not LINEAR:
        # Which part of other tensors a rank has is not known, so ranks are told apart.
        own = tuple(pair for pair in common if pair[0] != "batch_dims")
        return site._replace(attributes=(*site.attributes, *own))
    module: Any = site.module
    bases = {base.__name__ for base in type(module).__mro__}
    # Megatron splits an expert's weight without telling TransformerEngine.
    mode = "column" if bases & _COLUMN else "row" if bases & _ROW else getattr(module, "parallel_mode", None)
    said = (*common, *megatron_ranks.expert(model, name), *megatron_ranks.described(model, name, module))
    return site._replace(
        attributes=(*site.attributes, *dict(said).items()),
        of_tensor=megatron_ranks.module_placements(name, module, mode),
    )


def _maker_of(kind: type[nn.Module]) -> Callable[[Any], Site] | None:
    for base in kind.__mro__:
        make = _MAKERS.get(base.__name__) if base.__module__.startswith("transformer_engine.") else None
        if make is not None:
            return None if make is not _attention and inspects() else make
    return None


def _linear(module: Any, attributes: Attributes = _BEFORE_CAST) -> Site:
    lacks = [("grad_weight", _FUSED)] if module.fuse_wgrad_accumulation else []
    if not hasattr(module, "weight"):
        lacks += [("weight", _SPLIT), ("grad_weight", _SPLIT)]
    return Site(
        module, LINEAR, _arguments(module, 1), attributes=attributes, describe=_description_of(module),
        lacks=tuple(lacks),
    )  # fmt: skip


def _normalised_mlp(module: Any) -> Site:
    return Site(module, _BLOCK, _arguments(module, 1), attributes=_BEFORE_NORM)


def _grouped(module: Any) -> Site:
    names = _arguments(module, 2)

    def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        splits = operands_of(names, args, kwargs)[1]
        # Reading splits on the device would wait for the device.
        on_device = getattr(splits, "is_cuda", False)
        return {} if splits is None or on_device else {"m_splits": [int(split) for split in splits]}

    return Site(module, _GROUPED, names[:1], attributes=_BEFORE_CAST, describe=describe)


def _attention(module: Any) -> Site:
    names = list(inspect.signature(type(module).forward).parameters)[1:]

    def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        found = of_core_call(dict(zip(names, args, strict=False), **kwargs), default_kind, known)
        if _multiplies_in_fp8():
            found["attention_variant"] = [*found.get("attention_variant", ()), "fp8"]
        return found

    default_kind, known = str(module.attn_mask_type), of_core(module)
    layout = (("layout", str(module.qkv_format)),)
    return Site(module, ATTENTION, tuple(names[:3]), attributes=layout, describe=describe)


def autocast_state() -> Any:
    """Return TransformerEngine's state while its FP8 autocast is entered, None otherwise."""
    for name in _STATES:
        state: Any = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
        if isinstance(state, type) and state.is_fp8_enabled():  # type: ignore[attr-defined]
            return state
    return None


def _multiplies_in_fp8() -> bool:
    """Whether the products of attention are in FP8, too."""
    state = autocast_state()
    recipe = None if state is None else state.get_fp8_recipe()
    return any(getattr(recipe, name, False) for name in ("fp8_dpa", "fp8_mha"))


def _description_of(module: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """Return a function that describes a call.

    All calls have the same description, and the function does not hold the module.
    """
    known = {
        "sequence_parallel": bool(module.sequence_parallel),
        "use_bias": bool(module.use_bias),
        "wgrad_compute": any(parameter.requires_grad for parameter in module.parameters(recurse=False)),
        "tp_group_size": int(module.tp_size),
    }
    return lambda _args, _kwargs: known


def _arguments(module: nn.Module, count: int) -> tuple[str, ...]:
    """Return the first argument names of the module's forward. Subclasses name them differently."""
    return tuple(inspect.signature(type(module).forward).parameters)[1 : 1 + count]


_MAKERS: dict[str, Callable[[Any], Site]] = {
    "Linear": _linear,
    "LayerNormLinear": partial(_linear, attributes=_BEFORE_NORM),
    "LayerNormMLP": _normalised_mlp,
    "GroupedLinear": _grouped,
    "DotProductAttention": _attention,
}
