"""Operators that compiled graphs keep: capd's own functions as torch operators with an ordered effect.

torch.compile traces Python away and removes operators without a used result. An operator with a registered effect stays
in the graph. Each run calls it once, in order with the other effects.

An operator reaches the graph through a function that Dynamo does not trace (`allow_in_graph`). AOTAutograd runs this
function, with autograd on, whenever it traces. So the code around the operator is plain Python at trace time and cannot
fail the compilation.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable
from typing import Any, Optional

import torch

from capd_client.graph.partitions import cuts_at, missing_cuts
from capd_client.tensors.placements import mark

__all__ = [
    "Operator",
    "exporting",
    "flags_of",
    "in_graphs",
    "is_final_trace",
    "is_made_in_graph",
    "obstacle",
    "restored",
    "usable",
]

# torch has no types for it, as for `allow_in_graph`.
_Library: Any = torch.library.Library
_lock = threading.Lock()
_library: Any = None
_usable: Optional[bool] = None


def usable() -> bool:
    """Return whether torch.library can register effects. Loads the compiler, as any optimizer does.

    Older versions of torch have parts of it. These parts fail in the backward or under activation checkpointing, and
    would fail the job.
    """
    global _usable
    with _lock:
        if _usable is None:
            try:
                import torch._dynamo

                _usable = hasattr(torch.library, "_register_effectful_op")
            except Exception:
                _usable = False
        return _usable


class Operator:
    """The torch operator `capd::<name>`. Its first call, which happens in a trace, defines it with its effect."""

    def __init__(self, signature: str, body: Callable[..., Any], fake: Callable[..., Any]) -> None:
        """Define nothing yet.

        Args:
            signature: The schema without namespace. No tensor in it is an alias or is written to.
            body: Runs with the real tensors in every run of a compiled graph. Must not raise.
            fake: Replaces `body` at trace time.
        """
        self._signature = signature
        self._body = body
        self._fake = fake
        self._overload: Any = None

    def __call__(self, *args: Any) -> Any:
        """Call the operator. Activation checkpointing never recomputes the nodes that this adds to a graph."""
        overload = self._overload or self._define()
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        mode: Any = get_proxy_mode()
        if mode is None:
            return overload(*args)
        nodes = mode.tracer.graph.nodes
        before = len(nodes)
        result = overload(*args)
        _keep(itertools.islice(reversed(nodes), len(nodes) - before))
        return result

    def _define(self) -> Any:
        global _library
        with _lock:
            if self._overload is None:
                # The library is never removed, because graphs may run at any time.
                if _library is None:
                    _library = _Library("capd", "FRAGMENT")
                name = self._signature.partition("(")[0]
                _library.define(self._signature, tags=_tags())
                _library.impl(name, self._body, "CompositeExplicitAutograd")
                known = f"capd::{name}"
                torch.library.register_fake(known, cuts_at(known, self._fake), lib=_library)
                overload = getattr(torch.ops.capd, name).default
                from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

                _register_effectful_op(overload, _EffectType.ORDERED)
                _pass_selective_checkpoints()
                self._overload = overload
            return self._overload


def _pass_selective_checkpoints() -> None:
    """Allow graphs that run node by node (aot_eager, some vendors' backends) under selective checkpointing.

    The modes of selective checkpointing see every node, and torch has no rule for effects there. An effect computes
    nothing that could be saved.
    """
    from torch._higher_order_ops.effects import with_effects
    from torch.utils import checkpoint

    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode"):
        mode = getattr(checkpoint, name, None)
        if mode is not None and mode not in with_effects.python_key_table:
            with_effects.py_impl(mode)(_without_mode)


def _without_mode(_mode: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._higher_order_ops.effects import with_effects

    return with_effects(*args, **kwargs)


def in_graphs(function: Callable[..., Any]) -> None:
    """Make Dynamo put calls of `function` into its graphs unchanged, without tracing into it."""
    allow: Any = torch.compiler.allow_in_graph
    allow(function)


def exporting() -> bool:
    """Return whether torch.export is tracing. Its program may run in another process."""
    is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)
    return is_exporting()


def obstacle() -> str:
    """Return why torch cannot compile an effect in the graph that is being traced; empty if it can or traces none."""
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return ""
    if torch._functorch.config.activation_memory_budget < 1 or _region_budget() < 1:
        return "its activation_memory_budget is below 1, and no effect can be recomputed"
    if getattr(context, "ddp_optimizer_ctx", None) is not None:
        return "DDPOptimizer splits it; set torch._dynamo.config.optimize_ddp = False to capture"
    return missing_cuts()


def _region_budget() -> float:
    """Return `torch.autograd.graph.region_activation_memory_budget` of the region that is being traced."""
    trace: Any = torch.fx.traceback
    noted = trace.current_meta.get("custom") or {}
    budget: float = noted.get(getattr(trace, "MEMORY_BUDGET_ANNOTATION_KEY", None), 1.0)
    return budget


def is_final_trace() -> bool:
    """Return whether this trace creates the graph. torch runs the function once before, to inspect its effects."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def is_made_in_graph(tensor: torch.Tensor) -> bool:
    """Return whether the graph that is being traced computes this tensor from its inputs.

    An input that has a grad_fn outside of the graph gets a node from AOTAutograd that only raises.
    """
    made_by = tensor.grad_fn
    return made_by is not None and made_by.name() != "torch::autograd::Error"


def flags_of(*tensors: Optional[torch.Tensor]) -> int:
    """Return requires_grad and is_leaf of each tensor, two bits each. The running graph does not know them."""
    flags = 0
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            flags |= (tensor.requires_grad | tensor.is_leaf << 1) << 2 * place
    return flags


def restored(tensor: Optional[torch.Tensor], flags: int, placements: str = "") -> Any:
    """Return `tensor` with the flags and placements that were noted at trace time. It shares the values.

    Args:
        tensor: A tensor of a running graph, or None.
        flags: The result of `flags_of`; the two lowest bits count.
        placements: The result of `placements_of`.
    """
    if tensor is None:
        return None
    if not flags & 1 or not tensor.is_floating_point():
        return mark(tensor, placements)
    with torch.inference_mode(False), torch.enable_grad():
        leaf = tensor.detach().requires_grad_()
        return mark(leaf if flags & 2 else leaf.view_as(leaf), placements)


def _tags() -> tuple[torch.Tag, ...]:
    """Return the tags of capd's operators: keep it out of CUDA graphs, and pass tensors with any strides.

    A replay of a CUDA graph would not call the operator. For CUDA graphs of Inductor, the tag is not enough
    (`capd_client.graph.partitions`).
    """
    names = ("cudagraph_unsafe", "flexible_layout")
    return tuple(tag for name in names if (tag := getattr(torch.Tag, name, None)) is not None)


def _keep(nodes: Any) -> None:
    """Take new nodes out of the checkpointed region in which they were traced.

    The tags of the region would make the partitioner repeat the effect in the backward. torch's bookkeeping of effects
    fails on a repeated effect.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    for node in nodes:
        if node.meta.pop("recompute", None) is not None:
            node.meta.pop("ac_graph_id", None)
            if node.target is operator.getitem:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
