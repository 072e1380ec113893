"""Operators that compiled graphs keep: capd's own functions as torch operators with an ordered effect.

torch.compile traces Python away and removes operators without a used result. An operator with a registered effect
stays, is called once per run, and keeps its place among its like. It reaches the graph through a function that Dynamo
does not look into (`allow_in_graph`), so that everything around it is plain Python at trace time and cannot fail the
compilation: AOTAutograd runs that function, with autograd on, whenever it traces.
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

_Library: Any = torch.library.Library  # untyped, like allow_in_graph
_lock = threading.Lock()
_library: Any = None
_usable: Optional[bool] = None


def usable() -> bool:
    """Whether this torch lets operators have effects, in public. Loads the compiler, as any optimizer does.

    Older ones have parts of it, which fail in the backward or under activation checkpointing: they would fail the job.
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
    """`capd::<name>`: defined with its effect at the first call, which lies in a trace.

    Args:
        signature: the schema without namespace. It has no tensors that alias or are written to.
        body: runs with the real tensors whenever a compiled graph comes by. Must not raise.
        fake: what tracing sees in place of `body`.
    """

    def __init__(self, signature: str, body: Callable[..., Any], fake: Callable[..., Any]) -> None:
        self._signature = signature
        self._body = body
        self._fake = fake
        self._overload: Any = None

    def __call__(self, *args: Any) -> Any:
        """Call the operator; what this adds to a graph is never recomputed."""
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
                if _library is None:
                    _library = _Library(
                        "capd", "FRAGMENT"
                    )  # never taken down: graphs may come by at any time
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
    """Let graphs that are run node by node (aot_eager, some vendors' backends) lie in selectively checkpointed parts.

    The modes of these see every node, and torch has no rule for effects there. Effects compute nothing to be saved.
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
    """Let Dynamo put calls of `function` into its graphs as they are, instead of tracing into it."""
    allow: Any = torch.compiler.allow_in_graph
    allow(function)


def exporting() -> bool:
    """Whether the trace is one of torch.export, whose product leaves this process."""
    is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)
    return is_exporting()


def obstacle() -> str:
    """Why torch could not compile an effect in the graph that is being traced; empty where it can, or traces none."""
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return ""
    if torch._functorch.config.activation_memory_budget < 1 or _region_budget() < 1:
        return "its activation_memory_budget is below 1, and no effect can be recomputed"
    if getattr(context, "ddp_optimizer_ctx", None) is not None:
        return "DDPOptimizer splits it; set torch._dynamo.config.optimize_ddp = False to capture"
    return missing_cuts()


def _region_budget() -> float:
    """What `torch.autograd.graph.region_activation_memory_budget` says of the place that is being traced."""
    trace: Any = torch.fx.traceback
    noted = trace.current_meta.get("custom") or {}
    budget: float = noted.get(getattr(trace, "MEMORY_BUDGET_ANNOTATION_KEY", None), 1.0)
    return budget


def is_final_trace() -> bool:
    """Whether this is the trace that makes the graph; torch runs a function before, to see what it does."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def is_made_in_graph(tensor: torch.Tensor) -> bool:
    """Whether the graph that is traced computes this from its inputs.

    AOTAutograd gives an input a node that only raises, where it would have one outside.
    """
    made_by = tensor.grad_fn
    return made_by is not None and made_by.name() != "torch::autograd::Error"


def flags_of(*tensors: Optional[torch.Tensor]) -> int:
    """requires_grad and is_leaf of each tensor, two bits each: inside the graph they are not known any more."""
    flags = 0
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            flags |= (tensor.requires_grad | tensor.is_leaf << 1) << 2 * place
    return flags


def restored(tensor: Optional[torch.Tensor], flags: int, placements: str = "") -> Any:
    """`tensor` with what `flags_of` and `placements_of` noted of it; the values are shared."""
    if tensor is None:
        return None
    if not flags & 1 or not tensor.is_floating_point():
        return mark(tensor, placements)
    with torch.inference_mode(False), torch.enable_grad():
        leaf = tensor.detach().requires_grad_()
        return mark(leaf if flags & 2 else leaf.view_as(leaf), placements)


def _tags() -> tuple[torch.Tag, ...]:
    """Not to be recorded into CUDA graphs, whose replays would not call it; content with any strides.

    Where Inductor makes the CUDA graphs that does not suffice (capd_client.graph.partitions).
    """
    names = ("cudagraph_unsafe", "flexible_layout")
    return tuple(tag for name in names if (tag := getattr(torch.Tag, name, None)) is not None)


def _keep(nodes: Any) -> None:
    """Take new nodes out of the checkpointed region that they were traced in.

    Its tags would have the partitioner repeat the effect in the backward, which the effect's own bookkeeping does
    not survive.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    for node in nodes:
        if node.meta.pop("recompute", None) is not None:
            node.meta.pop("ac_graph_id", None)
            if node.target is operator.getitem:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
