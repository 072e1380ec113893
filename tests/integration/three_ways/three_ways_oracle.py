"""The oracle of `test_three_ways`: records the products of a model by torch's own global hooks, without capd.

The script says which iteration and micro-batch it is in; a forward outside of these is none. Modules are known by
identity, so that wrappers, which keep them, change no name. A product is a call of F.linear or of
F.scaled_dot_product_attention, and belongs to the innermost known module that runs; kinds of modules that multiply in
ways of their own are recorded at their boundary (`bounded`).
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

QKV = ("query", "key", "value")
At = tuple[int, int]  # iteration, micro-batch
Boundary = Callable[
    [nn.Module, tuple[Any, ...], Any], "tuple[str, tuple[Tensor, ...], Tensor | None, Tensor]"
]


class Product(NamedTuple):
    """module: its name. kind: "linear" or "attention"."""

    module: str
    kind: str


class Call(NamedTuple):
    """One call of a product. again: the recompute of a checkpointed segment, whose forward is known already."""

    product: Product
    at: At
    number: int
    again: bool = False


class Oracle:
    """Records from its creation on; `at` says where the script is, None where what runs is no training."""

    def __init__(self) -> None:
        self.at: At | None = None
        self.backward: At | None = None  # of a schedule that runs the gradients of weights apart
        self.bounded: tuple[type[nn.Module], ...] = ()  # parallel linears, which return (output, bias)
        self.output: Callable[[Tensor], Tensor] = lambda output: (
            output
        )  # of attention, as the framework hands it on
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []  # whose ids must stay theirs
        self._found: dict[tuple[Any, ...], tuple[Tensor, str]] = {}
        self._counts: Counter[Any] = Counter()
        self._waiting: dict[Product, deque[Call]] = defaultdict(deque)  # forwards without gradients
        self._last: dict[str, At] = {}  # micro-batch whose gradient came last, by module
        self._hooked: dict[int, Tensor] = {}
        self._local = threading.local()
        torch_module.register_module_forward_pre_hook(self._enter)
        torch_module.register_module_forward_hook(self._leave, always_call=True)
        self._linear, self._attention = F.linear, F.scaled_dot_product_attention
        _replace_everywhere(self._linear, self._run_linear)
        _replace_everywhere(self._attention, self._run_attention)
        # What is compiled computes the same as what is not, with a backend that leaves the kernels as they are.
        torch.compile = lambda model=None, **_: (lambda m: m) if model is None else model  # type: ignore[assignment]
        nn.Module.compile = lambda *_, **__: None  # type: ignore[method-assign, assignment]

    def watch(self, model: nn.Module, name: str = "", layers: Sequence[int] = (), wrapper: str = "") -> None:
        """Record the products of `model`, which is not wrapped yet, under its names and behind `name`.

        layers: the numbers that its layers have in the whole model, where it is a part of one. wrapper: the attribute
        of what a framework has put around blocks before anybody could have the model.
        """
        self._kept.append(model)
        for own, module in model.named_modules():
            whole = re.sub(r"(?<=layers\.)\d+", lambda at: str(layers[int(at[0])]), own) if layers else own
            whole = ".".join(part for part in whole.split(".") if part != wrapper)
            self._names[id(module)] = ".".join(filter(None, [name, whole])) or type(model).__name__

    def save(self, path: Path) -> None:
        """One file of bytes and one that says what each of them is."""
        assert not [name for name in sys.modules if name.partition(".")[0] in ("capd", "capd_client")]
        index = [[list(key), dtype, list(tensor.shape)] for key, (tensor, dtype) in self._found.items()]
        bits = [_bits(tensor) for tensor, _ in self._found.values()]
        np.savez(f"{path}.npz", *bits)
        Path(f"{path}.json").write_text(json.dumps(index))

    # -- which module runs -------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._stack().append(module)
        if isinstance(module, self.bounded) and id(module) in self._names:
            return self._enter_bounded(module, args)
        return None

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        stack = self._stack()
        while stack and stack.pop() is not module:
            pass
        if isinstance(module, self.bounded) and id(module) in self._names and result is not None:
            call = module.__dict__.pop("_oracle_call", None)
            if call is not None:
                if (
                    call.product.kind == "linear"
                ):  # now: what is sharded was gathered after the call had begun
                    self._weight(call, module.weight)  # type: ignore[arg-type]
                self._end(call, result[0] if isinstance(result, tuple) else result)

    def _stack(self) -> list[nn.Module]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack  # type: ignore[no-any-return]

    def _owner(self) -> nn.Module | None:
        return next((m for m in reversed(self._stack()) if id(m) in self._names), None)

    # -- products ----------------------------------------------------------------------------------------------

    def _run_linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        owner = self._owner()
        name = None if owner is None or isinstance(owner, self.bounded) else _linear_of(owner, weight)
        if owner is None or name is None:
            return self._linear(input, weight, bias)
        module = ".".join(filter(None, [self._names[id(owner)], name]))
        call, (operand,) = self._begin(Product(module, "linear"), {"input": input}, weight)
        output = self._linear(operand, self._own(call, weight), bias)
        self._end(call, output)
        # The caller may write into what it gets; a hook on a view that is written into is the caller's then. DTensors
        # are left alone: a copy of partial sums would be their sum.
        copied = call is not None and output.requires_grad and type(output) is Tensor
        return output.clone() if copied else output

    def _run_attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        owner = self._owner()
        if owner is None or isinstance(owner, self.bounded):
            return self._attention(query, key, value, *args, **kwargs)
        given = dict(zip(QKV, (query, key, value), strict=True))
        call, operands = self._begin(Product(self._names[id(owner)], "attention"), given)
        output = self._attention(*operands, *args, **kwargs)
        self._end(call, output)
        return output

    def _enter_bounded(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        linear = hasattr(module, "weight")
        names = ("input",) if linear else QKV
        product = Product(self._names[id(module)], "linear" if linear else "attention")
        given = dict(zip(names, args, strict=False))
        call, operands = self._begin(product, given)
        module.__dict__["_oracle_call"] = call
        return (*operands, *args[len(operands) :])

    def _begin(
        self, product: Product, operands: Mapping[str, Tensor], weight: Tensor | None = None
    ) -> tuple[Call | None, tuple[Tensor, ...]]:
        """The call, None if it is no training, and its operands with hooks on views of them."""
        call = self._called(product)
        if call is None:
            return None, tuple(operands.values())
        if not call.again:
            for name, operand in operands.items():
                self._keep(call, name, _as_multiplied(operand))
        if weight is not None:
            self._weight(call, weight)
        given = []
        for name, operand in operands.items():
            if torch.is_grad_enabled() and operand.requires_grad:
                operand = operand.view_as(operand)
                operand.register_hook(self._gradient(call, f"grad_{name}"))
            given.append(operand)
        return call, tuple(given)

    def _weight(self, call: Call, weight: Tensor) -> None:
        if not call.again and (_is_computed(weight) or self._is_first(call)):
            self._keep(call, "weight", _as_multiplied(weight))
        if weight.requires_grad and weight.is_leaf:
            self._hook_parameter(call.product.module, weight)

    def _called(self, product: Product) -> Call | None:
        if torch._C._current_graph_task_id() != -1:  # inside of a backward: a recompute
            waiting = self._waiting[product]
            return waiting.popleft()._replace(again=True) if waiting and torch.is_grad_enabled() else None
        if self.at is None:
            return None
        number = self._counts[product, self.at]
        self._counts[product, self.at] += 1
        call = Call(product, self.at, number)
        if not torch.is_grad_enabled():  # the first pass of a checkpoint whose graph the second one makes
            self._waiting[product].append(call)
        return call

    def _is_first(self, call: Call) -> bool:
        """Whether it is the product's first call in its iteration: a weight is recorded once in each."""
        mark = ("weight", call.product, call.at[0])
        self._counts[mark] += 1
        return self._counts[mark] == 1

    def _end(self, call: Call | None, output: Tensor) -> None:
        if call is None:
            return
        handed_on = self.output if call.product.kind == "attention" else lambda tensor: tensor
        if not call.again:
            self._keep(call, "output", handed_on(output))
        if torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(self._gradient(call, "grad_output", handed_on))

    def _own(self, call: Call | None, weight: Tensor) -> Tensor:
        """A view of a weight that is no parameter, whose gradient is this call's alone."""
        if call is None or weight.is_leaf or not (weight.requires_grad and torch.is_grad_enabled()):
            return weight
        own = weight.view_as(weight)
        own.register_hook(self._gradient(call, "grad_weight"))
        return own

    # -- gradients ---------------------------------------------------------------------------------------------

    def _gradient(
        self, call: Call, name: str, as_kept: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> Callable[[Tensor], None]:
        def came(gradient: Tensor) -> None:
            if name == "grad_output":
                if self.backward is not None and self._has(call, name):
                    return  # the second part of a backward in two
                self._last[call.product.module] = call.at
            self._keep(call, name, as_kept(gradient))

        return came

    def _hook_parameter(self, module: str, weight: Tensor) -> None:
        """Its gradient comes once for each backward: of all its uses, under the micro-batch that it belongs to."""
        if id(weight) in self._hooked:
            return
        self._hooked[id(weight)] = weight

        def came(gradient: Tensor) -> None:
            at = self.backward or self._last.get(module)
            if at is not None:
                product = Product(module, "linear")
                number = self._counts["grad_weight", product, at]
                self._counts["grad_weight", product, at] += 1
                self._keep(Call(product, at, number), "grad_weight", gradient)

        weight.register_hook(came)

    # -- records -----------------------------------------------------------------------------------------------

    def _key(self, call: Call, name: str) -> tuple[Any, ...]:
        return (call.product.module, call.product.kind, name, *call.at, call.number)

    def _has(self, call: Call, name: str) -> bool:
        return self._key(call, name) in self._found

    def _keep(self, call: Call, name: str, tensor: Tensor) -> None:
        key = self._key(call, name)
        assert key not in self._found, f"the oracle has {key} twice"
        local = getattr(tensor, "_local_tensor", tensor).detach()
        self._found[key] = local.clone(memory_format=torch.contiguous_format), str(local.dtype)


def _replace_everywhere(original: Any, ours: Any) -> None:
    """Also where a module has imported it by name."""
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()) if isinstance(module, ModuleType) else ():
            if value is original:
                setattr(module, name, ours)


def _linear_of(owner: nn.Module, weight: Tensor) -> str | None:
    """Which of the module's linears has this weight: "" for that of a Linear."""
    if not isinstance(owner, nn.MultiheadAttention):
        return "" if isinstance(owner, nn.Linear) else None
    if weight is owner.out_proj.weight:
        return "out_proj"
    width = owner.embed_dim
    rows, first = weight.shape[0] // width, weight.storage_offset() // (width * width)
    return {3: "in_proj", 2: "in_proj_kv"}.get(rows) or f"in_proj_{'qkv'[first]}"


def _is_computed(weight: Tensor) -> bool:
    """Whether each call has a weight of its own: the weight is no parameter, nor a part or a view of one."""
    return weight.grad_fn is not None and weight._base is None


def _as_multiplied(operand: Tensor) -> Tensor:
    kind = operand.device.type
    if torch.is_autocast_enabled(kind) and operand.is_floating_point():
        return operand.to(torch.get_autocast_dtype(kind))
    return operand


def _bits(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()
