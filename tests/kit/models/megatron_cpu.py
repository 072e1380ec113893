"""Lets megatron-core train on a CPU over gloo: what it asks of CUDA by name is answered by the CPU.

Only for the tests. Nothing of megatron's own arithmetic, schedules or autograd functions is replaced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["install"]

_FACTORIES = ("zeros", "empty", "ones", "full", "tensor", "arange", "empty_like", "zeros_like")


def install() -> None:
    """Import what is used of megatron, and answer for CUDA from then on."""
    import torch._dynamo

    torch._dynamo.config.disable = (
        True  # megatron's small fusions: a compiler on a CPU takes minutes for them
    )
    grouped_gemm: Any = ModuleType("grouped_gemm")
    grouped_gemm.ops = SimpleNamespace(gmm=_grouped_product)
    sys.modules["grouped_gemm"] = grouped_gemm  # a kernel that runs on GPUs alone
    from megatron.core import distributed, models, optimizer, pipeline_parallel  # noqa: F401
    from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor_type: Any = torch.Tensor
    tensor_type.cuda = lambda self, *_, **__: self
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(cuda, name, lambda *_: None)
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.Stream = cuda.Event = _Anything
    cuda.current_stream = cuda.default_stream = lambda *_: _Anything()
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16 reads it where TransformerEngine is absent
    dispatcher: Any = token_dispatcher
    dispatcher.maybe_move_tensor_to_cpu = _on_the_host
    exchange: Any = p2p_communication
    exchange._batched_p2p_ops = lambda **kwargs: list(_exchange(**kwargs).values())
    exchange._p2p_ops = _exchange
    norm: Any = torch_norm.WrappedTorchNorm
    norm.__new__ = staticmethod(_norm_for_sequences(norm.__new__))


class _Anything:
    """A stream or an event: everything on a CPU happens in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _Anything]:
        return lambda *_, **__: self

    def __enter__(self) -> _Anything:
        return self

    def __exit__(self, *_: object) -> None: ...


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **{**kwargs, **({"pin_memory": False} if "pin_memory" in kwargs else {})})

    return make


def _grouped_product(rows: Any, weights: Any, batch_sizes: Any, trans_b: bool = False) -> Any:
    """The rows of each expert, which follow each other, by its weight."""
    import torch

    weights = weights.transpose(1, 2) if trans_b else weights
    parts = zip(rows.split(batch_sizes.tolist()), weights, strict=True)
    return torch.cat([part @ weight for part, weight in parts])


def _on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What it does with a tensor on a device: sizes for gloo must be numbers, not tensors."""
    return tensor.numpy() if as_numpy and tensor is not None else tensor


def _exchange(
    *, group: Any, prev_pipeline_rank: int, next_pipeline_rank: int, **tensors: Any
) -> dict[str, Any]:
    """The sends and receives of a pipeline stage.

    Two stages are each other's next and previous ones, and gloo matches what two ranks exchange by order and tag alone.
    So activations and gradients have tags of their own.
    """
    from torch import distributed

    peers = {"prev": prev_pipeline_rank, "next": next_pipeline_rank}
    requests = {}
    for what in ("send_prev", "recv_prev", "send_next", "recv_next"):
        tensor, (verb, peer) = tensors[f"tensor_{what}"], what.split("_")
        if tensor is not None:
            begin = distributed.isend if verb == "send" else distributed.irecv
            requests[what] = begin(
                tensor, peers[peer], group, tag=1 if what in ("send_next", "recv_prev") else 2
            )
    return requests


def _norm_for_sequences(new: Callable[..., Any]) -> Callable[..., Any]:
    """torch's norms refuse sequence parallelism, but only lack the mark that has their gradients reduced."""

    def make(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        sequence_parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = new(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = sequence_parallel
        return norm

    return make
