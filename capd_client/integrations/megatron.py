"""Megatron-LM (megatron-core 0.12 to 0.20): finds linears, core attention and the router.

Linears are tapped at the functions that compute them. A module's return value is already reduced or scattered over
the tensor parallel ranks. If a layer receives its weight as an argument, that weight is captured. An output layer
that shares the embedding's weight is an example.

Under sequence parallelism the captured input is the rank's part of the sequence, as the function receives it. The
whole input is in a buffer that the next layer overwrites.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

from torch import nn

from capd_client.hooks.function_sites import FunctionSite
from capd_client.hooks.sites import Attributes, Site, operands_of
from capd_client.integrations import megatron_ranks as ranks
from capd_client.integrations.attention_facts import of_core, of_core_call
from capd_client.protocol.kinds import ATTENTION, LINEAR

__all__ = ["LAYERS", "LINEAR_FUNCTIONS", "find_sites", "is_one_kernel"]

LAYERS = "megatron.core.tensor_parallel.layers"
_ROUTER = "megatron.core.transformer.moe.router"
_EXPERTS = "megatron.core.transformer.moe.experts"
_ATTENTIONS = (
    ("megatron.core.transformer.dot_product_attention", "DotProductAttention"),
    ("megatron.core.extensions.transformer_engine", "TEDotProductAttention"),
)
LINEAR_FUNCTIONS = ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight")
"""The functions of `LAYERS` by which the linears multiply."""
_FUSED_GRADIENT = (
    "gradient_accumulation_fusion adds it to main_grad, not to grad; compute grad_outputᵀ · input"
)


class _Found(NamedTuple):
    """A module of a model that is tapped, by its qualified name, with the attributes of all its tensors."""

    model: nn.Module
    name: str
    module: Any
    attributes: Attributes


# In every version a layer's forward looks these functions up when it runs.
_LINEAR = FunctionSite(
    "megatron linear", LINEAR, ("input", "weight"),
    lambda: [(sys.modules[LAYERS], name) for name in LINEAR_FUNCTIONS],
)  # fmt: skip
# The method of routers calls a different function in each version.
_GATING = FunctionSite(
    "megatron router", LINEAR, ("input",), lambda: [(_class(_ROUTER, "Router"), "gating")], skip=1,
    read=lambda args, kwargs: (*operands_of(("input",), args[1:], kwargs), args[0].weight),
)  # fmt: skip


def find_sites(model: nn.Module) -> dict[str, list[Site]]:
    """Return the parallel linears, core attentions and routers of `model`, by their qualified names."""
    makers = _makers()
    found: dict[str, list[Site]] = {}
    common: Optional[Attributes] = None
    for name, module in model.named_modules():
        make = next((make for kind, make in makers if isinstance(module, kind)), None)
        if make is not None:
            common = ranks.coordinates(model) if common is None else common
            own = (*common, *ranks.expert(model, name), *ranks.described(model, name, module))
            found[name] = [make(_Found(model, name, module, tuple(dict(own).items())))]
    return found


def is_one_kernel(module: nn.Module) -> bool:
    """Whether the module's experts are multiplied by one kernel of grouped_gemm. That kernel is not tapped."""
    grouped = _class(_EXPERTS, "GroupedMLP")
    return grouped is not None and isinstance(module, grouped)


def _makers() -> list[tuple[type[nn.Module], Callable[[_Found], Site]]]:
    """Return the imported classes of megatron, each with the function that makes a site of its modules."""
    wanted = [
        (LAYERS, "ColumnParallelLinear", _column),
        (LAYERS, "RowParallelLinear", _row),
        (_ROUTER, "Router", _router),
        *((*where, _attention) for where in _ATTENTIONS),
    ]
    found = ((_class(module, name), make) for module, name, make in wanted)
    return [(kind, make) for kind, make in found if kind is not None]


def _class(module: str, name: str) -> Any:
    """Return a class of an imported module.

    None if the job has not imported it. Also None if its name is no class: without TransformerEngine it is a mock.
    """
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def _column(found: _Found) -> Site:
    return _linear(found, ranks.column_placements(found.name, found.module))


def _row(found: _Found) -> Site:
    return _linear(found, ranks.row_placements(found.name, found.module))


def _linear(found: _Found, placements: ranks.OfTensor) -> Site:
    fused = found.module.gradient_accumulation_fusion
    return Site(
        found.module, LINEAR, function=_LINEAR, attributes=found.attributes, of_tensor=placements,
        describe=_describe_linear, lacks=(("grad_weight", _FUSED_GRADIENT),) if fused else (),
    )  # fmt: skip


def _describe_linear(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    weight = operands_of(("input", "weight"), args, kwargs)[1]
    group = kwargs.get("tp_group")
    deferred = kwargs.get("grad_output_buffer") is not None
    return {
        "sequence_parallel": bool(kwargs.get("sequence_parallel")),
        "use_bias": kwargs.get("bias") is not None,
        "wgrad_compute": bool(weight.requires_grad) and not deferred,
        "tp_group_size": None if group is None else group.size(),
    }


def _router(found: _Found) -> Site:
    return Site(
        found.module, LINEAR, function=_GATING, attributes=found.attributes,
        of_tensor=ranks.router_placements(found.module),
    )  # fmt: skip


def _attention(found: _Found) -> Site:
    return Site(
        found.module, ATTENTION, ("query", "key", "value"), attributes=(("layout", "sbhd"), *found.attributes),
        of_tensor=ranks.attention_placements(found.model, found.name),
        describe=_description_of_attention(found.module),
    )  # fmt: skip


def _description_of_attention(
    module: nn.Module,
) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    names = ("query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias")
    known = of_core(module)

    def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return of_core_call({**dict(zip(names, args, strict=False)), **kwargs}, None, known)

    return describe
