"""nn.MultiheadAttention: finds the products inside one function of torch, F.multi_head_attention_forward.

While an attention is watched, torch's own code runs with replaced names for the functions that it calls. These
replacements are tapped. So no other module's products pass through here, and the numbers are torch's.

With `need_weights` (the default) the attention is two batched products: Q·scale by Kᵀ, and the weights by V. Their
operands are the scaled query, the key and the value. In compiled graphs these two products are not tapped, which is
reported. The linears are tapped there.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional

from capd_client.graph.owners import trace_unseen
from capd_client.hooks.calls import Call
from capd_client.hooks.function_sites import FunctionSite
from capd_client.hooks.gradients import GradHook
from capd_client.hooks.owners import current_tap, is_owned
from capd_client.hooks.sites import Site
from capd_client.hooks.tap import Tap
from capd_client.process.dynamo import traced_as, untraced
from capd_client.protocol.kinds import LINEAR
from capd_client.tensors.autograd import hang
from capd_client.tensors.inspect import without_modes

if TYPE_CHECKING:
    from typing import TypeGuard

__all__ = ["linears_of"]

_PACKED = ("in_proj", "in_proj_q", "in_proj_kv", "in_proj_k", "in_proj_v")
_APART = ("q_proj", "k_proj", "v_proj")
_OUT = "out_proj"

_NOT_IN_GRAPHS = (
    "attention that returns its weights (need_weights=True, the default of nn.MultiheadAttention) is not captured in "
    "compiled graphs; only its linears are"
)


def _linear(*args: Any) -> Any:
    """Call the current F.linear, which an emulation may have replaced."""
    return functional.linear(*args)


_linears = SimpleNamespace(**dict.fromkeys((*_PACKED, *_APART, _OUT), _linear))
"""The function that computes each of the linears: torch's function, tapped while the linear is watched."""


class _AttentionOfThread(threading.local):
    # The number of heads in the current call.
    heads = 0
    # The operands of the call's first batched product.
    scored: Optional[tuple[Tensor, Tensor, Optional[Tensor]]] = None


_local = _AttentionOfThread()


def _site_of(role: str) -> FunctionSite:
    """Return one of the linears. The last one also replaces the whole function."""
    places: list[tuple[Any, str]] = [(_linears, role)]
    if role == _OUT:
        places.append((functional, "multi_head_attention_forward"))
    site = FunctionSite(
        role, LINEAR, ("input", "weight"), lambda: places,
        replaced=lambda function: site.tapped(function) if function is _linear else _with_taps(function),
    )  # fmt: skip
    return site


_SITES = {role: _site_of(role) for role in vars(_linears)}


def linears_of(module: nn.Module, packed_as: tuple[str, ...] = ("in_proj",)) -> list[Site]:
    """Return the linears of a module that calls F.multi_head_attention_forward.

    A call decides how a packed weight is used. If query, key and value are one tensor, the weight is used whole. If
    key and value are one tensor, it is used in two parts. Otherwise it is used in three parts.

    Args:
        module: The attention.
        packed_as: The parts that the calls of the module use, as far as is known. They replace the other parts.
    """
    packed = getattr(module, "in_proj_weight", None) is not None
    held = dict.fromkeys(_PACKED, "in_proj_weight") if packed else {role: f"{role}_weight" for role in _APART}
    held[_OUT] = f"{_OUT}.weight"
    return [
        Site(
            module,
            LINEAR,
            function=_SITES[role],
            suffix=role,
            parameter=parameter,
            instead_of=packed_as if role in _PACKED and role not in packed_as else (),
        )
        for role, parameter in held.items()
    ]


def _with_taps(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return F.multi_head_attention_forward with taps.

    If another library has replaced the function, return it unchanged.
    """
    packed = vars(functional).get("_in_projection_packed")
    if not _is_torchs(function) or not _is_torchs(packed):
        return function
    _linears.packed = _adopted(packed, "packed", {"linear": _part_of_packed})
    ours = {
        "_in_projection": _in_projection,
        "_in_projection_packed": _in_projection_packed,
        "linear": lambda *args: _linears.out_proj(*args),
        "scaled_dot_product_attention": lambda *args: functional.scaled_dot_product_attention(*args),
    }
    run = _adopted(function, "run", {**ours, "torch": _Torch()})

    @traced_as(_adopted(function, "in_graph", {**ours, "softmax": _softmax_in_graph}))
    def in_graph(*args: Any, **kwargs: Any) -> Any:
        """Replace the function in torch's table of untraced functions.

        torch may fill that table while the function is patched, for example for a process group. It unwraps the
        function once then, and once again when it compiles.
        """

    @traced_as(in_graph, calls_the_job=True)
    @functools.wraps(function)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        if not is_owned():
            return function(*args, **kwargs)
        _local.heads, _local.scored = kwargs["num_heads"] if "num_heads" in kwargs else args[4], None
        return run(*args, **kwargs)

    return tapped


def _is_torchs(function: Any) -> TypeGuard[FunctionType]:
    return isinstance(function, FunctionType) and function.__globals__ is vars(functional)


def _adopted(function: FunctionType, name: str, ours: dict[str, Any]) -> Callable[..., Any]:
    """Return `function` with other values for some of the names it uses.

    The names are those of a module, because the compiler looks them up there.
    """
    module = ModuleType(f"{__name__}.{name}")
    vars(module).update({**vars(functional), **ours, "__name__": module.__name__})
    sys.modules[module.__name__] = module
    adopted = FunctionType(function.__code__, vars(module), function.__name__, function.__defaults__)
    adopted.__kwdefaults__ = function.__kwdefaults__
    return adopted


def _in_projection(
    q: Tensor, k: Tensor, v: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, b_q: Any, b_k: Any, b_v: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _linears.q_proj(q, w_q, b_q), _linears.k_proj(k, w_k, b_k), _linears.v_proj(v, w_v, b_v)


def _in_projection_packed(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Optional[Tensor] = None
) -> tuple[Tensor, Tensor, Tensor]:
    if k is v:
        return _linears.packed(q, k, v, w, b)  # type: ignore[no-any-return]
    w_q, w_k, w_v = w.chunk(3)
    b_q, b_k, b_v = (None, None, None) if b is None else b.chunk(3)
    return _linears.in_proj_q(q, w_q, b_q), _linears.in_proj_k(k, w_k, b_k), _linears.in_proj_v(v, w_v, b_v)


def _part_of_packed(x: Tensor, w: Tensor, b: Optional[Tensor] = None) -> Tensor:
    """Compute the linear of a packed weight or of a part of it. Only the query's part is square."""
    parts = w.shape[0] // w.shape[1]
    found = _linears.in_proj_q if parts == 1 else _linears.in_proj_kv if parts == 2 else _linears.in_proj
    return found(x, w, b)  # type: ignore[no-any-return]


def _softmax_in_graph(scores: Tensor, dim: int) -> Tensor:
    """Report an attention with weights: this softmax runs only between its two products."""
    trace_unseen("attention", _NOT_IN_GRAPHS)
    return functional.softmax(scores, dim=dim)


class _Torch:
    """The module torch with tapped batched products, for an attention whose weights are requested."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def baddbmm(mask: Tensor, q: Tensor, k_t: Tensor) -> Tensor:
        _local.scored = (q, k_t, mask)
        return torch.baddbmm(mask, q, k_t)

    @staticmethod
    def bmm(left: Tensor, right: Tensor) -> Tensor:
        scored, _local.scored = _local.scored, None
        if scored is None:
            _local.scored = (left, right, None)
            return torch.bmm(left, right)
        tap = current_tap("attention")
        q, k_t, mask = scored
        call = None if tap is None else _begin(tap, (q, k_t, right), mask)
        output = torch.bmm(left, right)
        if tap is not None and call is not None:
            _end(tap, call, output)
        return output


@untraced
def _begin(tap: Tap, used: tuple[Tensor, ...], mask: Optional[Tensor]) -> Optional[Call]:
    q, k_t, v = used
    try:
        with without_modes():
            operands = [_by_head(t) for t in (q, k_t.transpose(-2, -1), v)]
        module = tap.module()
        # The query was multiplied by the scale before.
        told = {"attn_mask": mask, "dropout_p": getattr(module, "dropout", None), "scale": 1.0}
        call = None if module is None else tap.begin(module, operands, None, tuple(operands), told)
        if call is not None and torch.is_grad_enabled():
            _watch_gradients(tap, call, used, operands)
        return call
    except Exception as error:
        tap.failed("attention call", error)
        return None


def _watch_gradients(tap: Tap, call: Call, used: tuple[Tensor, ...], operands: list[Tensor]) -> None:
    """Hook the gradients of the operands. No alias is needed, because only the products use these tensors."""
    for name, tensor, operand in zip(tap.kind.operands, used, operands, strict=True):
        if tap.wants(f"grad_{name}", call) and tensor.requires_grad:
            hook = GradHook(tap, f"grad_{name}", call, operand.shape)
            hang(tensor, _turned(hook) if name == "key" else hook)


def _turned(hook: GradHook) -> Callable[[Tensor], None]:
    return lambda gradient: hook(gradient.transpose(-2, -1))


@untraced
def _end(tap: Tap, call: Call, output: Tensor) -> None:
    try:
        with without_modes():
            whole = _by_head(output)
        tap.end(call, whole)
    except Exception as error:
        tap.failed("attention call", error)


def _by_head(tensor: Tensor) -> Tensor:
    """Reshape [batch · heads, tokens, width] to [batch, heads, tokens, width]."""
    heads = _local.heads
    return tensor.view(tensor.shape[0] // heads, heads, *tensor.shape[1:])
