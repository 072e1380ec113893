"""This rank's coordinates in Megatron's parallel groups, and the part of a tensor that it holds.

Placements are written in the grammar of docs/logical.md. "S(0)" is sharded along dimension 0, and "S(-1)" along the
last one. "R" is the same on all ranks, and "P(sum)" is a part of a sum. A dimension of one rank has no placement.

Megatron's tensors are [sequence, batch, hidden]. Context parallelism deals out the sequence in zigzag ("Z(0)"), or as
CAPD_CP_ORDER says. Sequence parallelism splits what is left. Tensor parallelism of the experts is the dimension "etp".
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Optional, cast

from torch import nn

from capd_client.config.settings import load_config
from capd_client.hooks.sites import Attributes

__all__ = [
    "OfTensor", "attention_placements", "column_placements", "coordinates", "described", "expert", "module_placements",
    "router_placements", "row_placements",
]  # fmt: skip

OfTensor = tuple[tuple[str, Attributes], ...]

_GROUPS = {
    "tp": "tensor_model_parallel", "pp": "pipeline_model_parallel", "dp": "data_parallel",
    "cp": "context_parallel", "ep": "expert_model_parallel",
}  # fmt: skip
_EXPERT_GROUPS = {"etp": "expert_tensor_parallel", "edp": "expert_data_parallel"}
_LOCAL_EXPERT = re.compile(r"(.*)\.local_experts\.(\d+)\.")
_TOKENS = (
    "input",
    "output",
    "grad_output",
    "grad_input",
    "query",
    "key",
    "value",
    "grad_query",
    "grad_key",
    "grad_value",
)
_TRAINING = "megatron.training.global_vars"


def coordinates(model: nn.Module) -> Attributes:
    """Return this rank's coordinates in every group, such as tp_rank, tp_size and pp_rank.

    vpp_rank is the number of the chunk on this rank. batch_dims names the groups whose ranks have other samples.
    dropout is the largest probability of the configuration, if there is any.
    """
    found = _places(_GROUPS)
    chunks = _ask("get_virtual_pipeline_model_parallel_world_size")
    if chunks is not None:
        found += [("vpp_rank", _chunk(model, chunks)), ("vpp_size", chunks)]
    if "dp_rank" in dict(found):
        found.append(("batch_dims", ("dp",)))
    if dropout := _dropout(model):
        found.append(("dropout", dropout))
    return tuple(found)


def _places(groups: Mapping[str, str]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, group in groups.items():
        both = [_ask(f"get_{group}_rank"), _ask(f"get_{group}_world_size")]
        if None not in both:
            found += zip((f"{name}_rank", f"{name}_size"), both, strict=True)
    return found


def _dropout(model: nn.Module) -> float:
    """Return the largest probability of dropout in the model's configuration."""
    for module in model.modules():
        config = getattr(module, "config", None)
        given = [getattr(config, f"{what}_dropout", None) for what in ("hidden", "attention")]
        if any(isinstance(one, float) for one in given):
            return max(one for one in given if isinstance(one, float))
    return 0.0


def _ask(function: str) -> Optional[int]:
    """Return the answer of a function of parallel_state.

    None if the group does not exist, because a job may pass its own groups to the modules.
    """
    state = sys.modules.get("megatron.core.parallel_state")
    ask: Optional[Callable[[], Optional[int]]] = getattr(state, function, None)
    try:
        return None if ask is None else ask()
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
    """Return what is said of the module of this name if it belongs to an expert.

    This is the number of the expert over all ranks, and the rank's place in the groups of the experts. The ranks of
    expert data parallelism have other tokens.
    """
    match = _LOCAL_EXPERT.match(name)
    if match is None:
        return ()
    local: Any = model.get_submodule(match[1])
    number = (_ask("get_expert_model_parallel_rank") or 0) * local.num_local_experts + int(match[2])
    places = _places(_EXPERT_GROUPS)
    batch = (("batch_dims", ("edp",)),) if "edp_rank" in dict(places) else ()
    return (("expert", number), *places, *batch)


def described(model: nn.Module, name: str, module: Any) -> Attributes:
    """Return what a reader needs to cut the whole tensors of a module.

    A fused projection has the heads of the whole attention. The first linear of a gated MLP is marked.
    """
    if _is_gated(name, module):
        return (("gated_linear_unit", True),)
    if not name.endswith("linear_qkv"):
        return ()
    config = getattr(_parent(model, name), "config", None)
    numbers = [
        getattr(config, key, None) for key in ("num_attention_heads", "num_query_groups", "kv_channels")
    ]
    if getattr(config, "attention_output_gate", False) or not all(type(number) is int for number in numbers):
        return ()
    return tuple(zip(("qkv_heads", "qkv_groups", "qkv_head_dim"), numbers, strict=True))


def _is_gated(name: str, module: Any) -> bool:
    config = getattr(module, "config", None)
    return name.endswith("linear_fc1") and bool(getattr(config, "gated_linear_unit", False))


def _parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def column_placements(name: str, module: Any) -> OfTensor:
    """Return the placements for a weight split by rows. The output is then split by its last dimension.

    A rank of a gated MLP has its part of the gate, then its part of the other half: two blocks.
    """
    split: dict[str, str] = {}
    if module.output_size != module.output_size_per_partition:
        scattered = module.sequence_parallel and not module.explicit_expert_comm
        reduced = not (module.disable_grad_reduce or module.explicit_expert_comm)
        blocks = ":2" if _is_gated(name, module) else ""
        split = dict.fromkeys(("weight", "grad_weight"), f"S(0){blocks}")
        split |= dict.fromkeys(("output", "grad_output"), f"S(-1){blocks}")
        split["input"] = "S(0)" if scattered else "R"
        split["grad_input"] = "S(0)" if scattered else "R" if reduced else "P(sum)"
    return _with_true_sizes(_of_linear(module, split), _vocabulary(name, module))


def row_placements(name: str, module: Any) -> OfTensor:
    """Return the placements for a weight split by columns. The input is then split by its last dimension."""
    if module.input_size == module.input_size_per_partition:
        return _of_linear(module, {})
    split = dict.fromkeys(("input", "grad_input"), "S(-1)") | dict.fromkeys(("weight", "grad_weight"), "S(1)")
    return _of_linear(module, {**split, "output": "P(sum)", "grad_output": "R"})


def attention_placements(model: nn.Module, name: str) -> OfTensor:
    """Return the placements of attention, whose heads are split.

    If there are fewer groups than ranks, consecutive ranks hold the same keys and values, and terms of the sum that
    is their gradient. The attention itself is then told that there are as many groups as ranks, so its parent is asked.
    """
    ranks = _size("tp")
    owners = (_parent(model, name), model.get_submodule(name))
    configs = [getattr(owner, "config", None) for owner in owners]
    groups = next(count for c in configs if type(count := getattr(c, "num_query_groups", None)) is int)
    split: dict[str, str] = {}
    if ranks > 1:
        split = dict.fromkeys(("query", "grad_query"), "S(-2)") | dict.fromkeys(
            ("output", "grad_output"), "S(-1)"
        )
        shared = ranks // groups if groups < ranks else 1
        split |= dict.fromkeys(("key", "value"), f"S(-2)*{shared}" if shared > 1 else "S(-2)")
        split |= dict.fromkeys(("grad_key", "grad_value"), f"S(-2)+{shared}" if shared > 1 else "S(-2)")
    return _placements(tp=split, cp=_dealt_out())


def router_placements(module: Any) -> OfTensor:
    """Return the placements of a router. Every rank routes all its tokens, or its part under sequence parallelism."""
    split: dict[str, str] = {}
    if _size("tp") > 1:
        scattered = module.config.sequence_parallel
        tokens = ("input", "output", "grad_output", "grad_input")
        split = dict.fromkeys(tokens, "S(0)" if scattered else "R")
        split |= {"weight": "R", "grad_weight": "P(sum)" if scattered else "R"}
    return _placements(tp=split, cp=_dealt_out())


def module_placements(name: str, module: Any, mode: Optional[str]) -> OfTensor:
    """Return the placements of a linear that is seen from outside: after the communication of its module.

    Args:
        name: The name of the module.
        module: The module.
        mode: "column" or "row"; None if the weight is not split.
    """
    of_expert = _LOCAL_EXPERT.match(name) is not None
    size = (_ask("get_expert_tensor_parallel_world_size") or 1) if of_expert else _size("tp")
    split: dict[str, str] = {}
    if size > 1 and mode is not None:
        blocks = ":2" if _is_gated(name, module) else ""
        # Experts communicate outside of their linears.
        tokens = "S(0)" if not of_expert and module.sequence_parallel else "R"
        rows, columns = (f"S(0){blocks}", f"S(-1){blocks}") if mode == "column" else ("S(1)", "S(-1)")
        inner, outer = ("output", "input") if mode == "column" else ("input", "output")
        split = dict.fromkeys(("weight", "grad_weight"), rows)
        split |= {inner: columns, f"grad_{inner}": columns, outer: tokens, f"grad_{outer}": tokens}
        if of_expert:
            split["grad_input" if mode == "column" else "output"] = "P(sum)"
    if of_expert:
        return _placements(etp=split)
    return _placements(tp=split, cp=_dealt_out())


def _of_linear(module: Any, split: Mapping[str, str]) -> OfTensor:
    # The rows of an expert come from all ranks that send it tokens, in the order of the dispatcher.
    if module.is_expert:
        return _placements(etp=split)
    return _placements(tp=split, cp=_dealt_out())


def _dealt_out() -> dict[str, str]:
    """Return the placements over context parallel ranks, which compute with the same parameters."""
    if _size("cp") == 1:
        return {}
    part = "Z(0)" if _cp_order(os.environ.get("CAPD_CP_ORDER")) == "zigzag" else "S(0)"
    return {**dict.fromkeys(_TOKENS, part), "weight": "R", "grad_weight": "P(sum)"}


@lru_cache(maxsize=8)
def _cp_order(_: Optional[str]) -> str:
    """Return the setting. It is resolved once for each value of its variable."""
    return load_config().cp_order


def _size(group: str) -> int:
    return _ask(f"get_{_GROUPS[group]}_world_size") or 1


def _vocabulary(name: str, module: Any) -> Optional[int]:
    """Return the true size of a vocabulary that Megatron's training loop padded; None if it is not known."""
    if not name.endswith("output_layer"):
        return None
    tokenizer = getattr(sys.modules.get(_TRAINING), "_GLOBAL_TOKENIZER", None)
    size = getattr(tokenizer, "vocab_size", None)
    return size if type(size) is int and 0 < size < module.output_size else None


def _with_true_sizes(of_tensor: OfTensor, size: Optional[int]) -> OfTensor:
    if size is None:
        return of_tensor
    rows = dict.fromkeys(("weight", "grad_weight"), ((0, size),))
    sizes = rows | dict.fromkeys(("output", "grad_output"), ((-1, size),))
    known = dict(of_tensor)
    both = {name: (*known.get(name, ()), ("true_sizes", true)) for name, true in sizes.items()}
    return tuple({**known, **both}.items())


def _placements(**of_dimension: Mapping[str, str]) -> OfTensor:
    """Return the placements of all tensors. of_dimension: by the name of a dimension, then of a tensor."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for dimension, placements in of_dimension.items():
        for name, placement in placements.items():
            found.setdefault(name, []).append((f"{dimension}_placement", placement))
    # Context parallelism splits first.
    order = (("mesh", ("cp", "tp")),)
    return tuple((name, (*own, *(order if len(own) > 1 else ()))) for name, own in found.items())
