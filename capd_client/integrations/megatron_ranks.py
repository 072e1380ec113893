"""This rank's coordinates in Megatron's parallel groups, and the part of a tensor that it holds.

Placements over the tensor parallel ranks are written as DTensor writes them. "S(0)" is sharded along dimension 0,
and "S(-1)" along the last one. "R" is the same on all ranks, and "P(sum)" is a part of a sum. Without tensor
parallelism there are no placements.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, Optional, cast

from torch import nn

from capd_client.hooks.sites import Attributes

__all__ = [
    "OfTensor", "attention_placements", "column_placements", "coordinates", "expert",
    "router_placements", "row_placements",
]  # fmt: skip

OfTensor = tuple[tuple[str, Attributes], ...]

_GROUPS = {
    "tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "dp": "data_parallel",
    "cp": "context_parallel", "ep": "expert_model_parallel",
}  # fmt: skip
_LOCAL_EXPERT = re.compile(r"(.*)\.local_experts\.(\d+)\.")


def coordinates(model: nn.Module) -> Attributes:
    """Return this rank's coordinates in every group, such as tp_rank, tp_size and pp_rank.

    vpp_rank is the number of the chunk on this rank.
    """
    found: list[tuple[str, Any]] = []
    for name, group in _GROUPS.items():
        for what, asked in (("rank", f"get_{group}_rank"), ("size", f"get_{group}_world_size")):
            number = _ask(asked)
            if number is not None:
                found.append((f"{name}_{what}", number))
    chunks = _ask("get_virtual_pipeline_model_parallel_world_size")
    if chunks is not None:
        found += [("vpp_rank", _chunk(model, chunks)), ("vpp_size", chunks)]
    return tuple(found)


def _ask(function: str) -> Optional[int]:
    """Return the answer of a function of parallel_state.

    None if the group does not exist, because a job may pass its own groups to the modules.
    """
    ask: Callable[[], Optional[int]] = getattr(sys.modules["megatron.core.parallel_state"], function)
    try:
        return ask()
    except AssertionError:
        return None


def _chunk(model: nn.Module, chunks: int) -> Optional[int]:
    """Return the number of `model` among this rank's chunks.

    Before 0.13 layers are split evenly and modules do not say it.
    """
    for module in model.modules():
        if type(stage := getattr(module, "vp_stage", None)) is int:
            return stage
        if type(number := getattr(module, "layer_number", None)) is int:
            return (number - 1) * chunks // int(cast("Any", module.config).num_layers)
    return None


def expert(model: nn.Module, name: str) -> Attributes:
    """Return the number, over all ranks, of the expert that the module of this name belongs to."""
    match = _LOCAL_EXPERT.match(name)
    if match is None:
        return ()
    local: Any = model.get_submodule(match[1])
    return (
        ("expert", (_ask("get_expert_model_parallel_rank") or 0) * local.num_local_experts + int(match[2])),
    )


def column_placements(module: Any) -> OfTensor:
    """Return the placements for a weight split by rows. The output is then split by its last dimension."""
    if module.output_size == module.output_size_per_partition:
        return ()
    scattered = module.sequence_parallel and not module.explicit_expert_comm
    reduced = not (module.disable_grad_reduce or module.explicit_expert_comm)
    return _placements(
        input="S(0)" if scattered else "R", weight="S(0)", output="S(-1)", grad_output="S(-1)", grad_weight="S(0)",
        grad_input="S(0)" if scattered else "R" if reduced else "P(sum)",
    )  # fmt: skip


def row_placements(module: Any) -> OfTensor:
    """Return the placements for a weight split by columns. The input is then split by its last dimension."""
    if module.input_size == module.input_size_per_partition:
        return ()
    return _placements(
        input="S(-1)", weight="S(1)", output="P(sum)", grad_output="R", grad_input="S(-1)", grad_weight="S(1)"
    )


def attention_placements(module: Any) -> OfTensor:
    """Return the placements of attention, whose heads are split.

    If there are fewer groups than ranks, several ranks hold the same keys and values.
    """
    ranks, groups = _ask("get_tensor_model_parallel_world_size") or 1, module.config.num_query_groups
    if ranks == 1:
        return ()
    heads = dict.fromkeys(("query", "grad_query"), "S(-2)")
    if groups >= ranks:
        heads |= dict.fromkeys(("key", "value", "grad_key", "grad_value"), "S(-2)")
    return _placements(**heads, output="S(-1)", grad_output="S(-1)")


def router_placements(module: Any) -> OfTensor:
    """Return the placements of a router. Every rank routes all its tokens, or its part under sequence parallelism."""
    if (_ask("get_tensor_model_parallel_world_size") or 1) == 1:
        return ()
    scattered = module.config.sequence_parallel
    tokens = dict.fromkeys(("input", "output", "grad_output", "grad_input"), "S(0)" if scattered else "R")
    return _placements(**tokens, weight="R", grad_weight="P(sum)" if scattered else "R")


def _placements(**of_tensor: str) -> OfTensor:
    return tuple((name, (("tp_placement", placement),)) for name, placement in of_tensor.items())
