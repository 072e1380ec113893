"""The oracle of values: captured tensors must satisfy the algebra of the products they were operands of.

Of a linear: Y = XWᵀ + b, dX = dYW, dW = Σ dYᵀX over the calls of a micro-batch; of attention: O from q, k and v, and
their gradients from dO. No reference run is needed: a tensor of another micro-batch, or one that was overwritten
before it was copied, gives errors of order 1 (`controls` makes such ones). What there must be: see `expected.py`.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import capd
from tests.kit.jobs.products import assert_products_hold

Bias = Callable[["Call"], Tensor | None]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Call(NamedTuple):
    """One product: one call of a module."""

    rank: int
    module: str
    layer_type: str
    iteration: int
    micro_batch: int
    call: int


class Record(NamedTuple):
    """What and when one captured tensor is."""

    call: Call
    operation: str
    tensor_name: str


class Entry(NamedTuple):
    """A captured tensor, its key, and the attributes of its record."""

    record: Record
    key: Any
    tensor: Tensor
    attributes: dict[str, Any]


class Mismatch(AssertionError):
    """Captured tensors that contradict each other."""

    def __init__(self, what: str, call: Call, error: float, tolerance: float) -> None:
        super().__init__(f"{what} of {call}: relative error {error:.3g}, allowed {tolerance:g}")
        self.error = error


class Captures:
    """All captured tensors of a run, by the products that they belong to."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = list(entries)
        self.records = Counter(entry.record for entry in self.entries)

    @classmethod
    def of_store(cls, path: str | Path, **key: Any) -> Captures:
        """Read a store; `key` restricts it as in `Store.find`. `capd check` must find all of its products sound."""
        assert_products_hold(Path(path))
        found = []
        for series in capd.open(path).find(**key):
            k = series.key
            for i, record in enumerate(series.records):
                call = Call(k.rank, k.module, k.layer_type, record.iteration, record.micro_batch, record.call)
                where = Record(call, k.operation, k.tensor_name)
                found.append(Entry(where, k, series.torch(i), dict(record.attributes)))
        return cls(found)

    def of(self, *modules: str) -> Captures:
        """Those of these modules and of the modules inside them."""
        inside = tuple(f"{module}." for module in modules)
        return self.without(lambda r: r.call.module not in modules and not r.call.module.startswith(inside))

    def without(self, unwanted: Callable[[Record], bool]) -> Captures:
        """Those whose record is not `unwanted`."""
        return Captures(entry for entry in self.entries if not unwanted(entry.record))

    def calls(self, layer_type: str) -> dict[Call, dict[str, Tensor]]:
        """The tensors of every product of a type, weights not among them (see `weights`)."""
        products: dict[Call, dict[str, Tensor]] = defaultdict(dict)
        for entry in self.entries:
            call, _, name = entry.record
            if call.layer_type == layer_type and name != "weight":
                name = _unambiguous(entry.record)
                assert name not in products[call], f"captured twice: {entry.record}"
                products[call][name] = entry.tensor
        return dict(products)

    def weights(self) -> dict[Call, Tensor]:
        """The weights, by the call that each was captured with (see `_weight_of`)."""
        found: dict[Call, Tensor] = {}
        for (call, _, name), _, tensor, _ in self.entries:
            if name == "weight":
                assert call not in found, f"captured twice: the weight of {call}"
                found[call] = tensor
        return found

    def one(self, module: str, tensor_name: str, at: tuple[int, int, int] = (0, 0, 0), **call: Any) -> Tensor:
        """The tensor captured at (iteration, micro_batch, call); fails unless there is exactly one."""
        wanted = {
            "module": module,
            **dict(zip(("iteration", "micro_batch", "call"), at, strict=True)),
            **call,
        }
        found = [
            e.tensor for e in self.entries
            if e.record.tensor_name == tensor_name and wanted.items() <= e.record.call._asdict().items()
        ]  # fmt: skip
        assert len(found) == 1, (module, tensor_name, at, len(found))
        return found[0]


def _weight_of(call: Call, weights: dict[Call, Tensor]) -> Tensor | None:
    """That of the call itself, where every call has its own; else the one of its iteration."""
    own = weights.get(call)
    return weights.get(call._replace(micro_batch=0, call=0)) if own is None else own


def _unambiguous(record: Record) -> str:
    return record.tensor_name if record.operation == "forward" else f"backward {record.tensor_name}"


def error_of(found: Tensor, truth: Tensor) -> float:
    """The largest difference relative to the largest true value; 0.0 means equal, and of one shape."""
    assert found.shape == truth.shape, (found.shape, truth.shape)
    if torch.equal(found, truth):
        return 0.0
    difference = (found.double() - truth.double()).abs().max().item()
    scale = truth.double().abs().max().item()
    return difference / scale if scale else float("inf")


class _Checker:
    """Counts what was compared, so that a check of nothing is seen."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.done: Counter[str] = Counter()

    def equal(self, what: str, call: Call, found: Tensor, truth: Tensor) -> None:
        error = error_of(found, truth)
        if not error <= self.tolerance:
            raise Mismatch(what, call, error, self.tolerance)
        self.done[what] += 1


def check_linear(
    captures: Captures,
    *,
    bias: Bias = lambda call: None,
    transposed: Callable[[str], bool] = lambda module: False,
    tied: Iterable[str] = (),
    layer_type: str = "linear",
    tolerance: float = 0.0,
) -> Counter[str]:
    """Check every linear product; returns how many of "Y", "dX" and "dW" were compared.

    Args:
        captures: of which the products with all their tensors are checked.
        bias: what the product added (the store holds no biases).
        transposed: whether a module keeps its weight as [in, out] (GPT-2's Conv1D).
        tied: modules whose weight gets gradients from elsewhere, too: their dW is not compared.
        layer_type: of the keys.
        tolerance: allowed relative error; 0.0 is equality, which fp32 on one machine gives.
    """
    checker, weights, tied = _Checker(tolerance), captures.weights(), set(tied)
    products = captures.calls(layer_type)
    gradients: dict[Call, Tensor] = {}  # first call of each micro-batch → Σ dYᵀX
    for call in sorted(products, key=lambda call: -call.call):  # autograd adds up the last call first
        tensors = products[call]
        w = _weight_of(call, weights)
        flip = transposed(call.module)
        x, y = tensors.get("input"), tensors.get("output")
        dy, dx = tensors.get("backward grad_output"), tensors.get("backward grad_input")
        if x is not None and w is not None and y is not None:
            checker.equal("Y", call, y, product(x, w, bias(call), transposed=flip))
        if dy is not None and w is not None and dx is not None:
            truth = dy.reshape(-1, dy.shape[-1]).mm(w.t() if flip else w)
            checker.equal("dX", call, dx, truth.reshape(dx.shape))
        if dy is not None and x is not None:
            rows_x, rows_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
            dw = rows_x.t().mm(rows_dy) if flip else rows_dy.t().mm(rows_x)
            first = call if call in weights else call._replace(call=0)
            gradients[first] = dw if first not in gradients else gradients[first] + dw
    for call, tensors in products.items():
        if "backward grad_weight" in tensors and call.module not in tied:
            checker.equal("dW", call, tensors["backward grad_weight"], gradients[call])
    return checker.done


def product(x: Tensor, w: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    """XWᵀ + b as torch computes it; of a transposed weight [in, out] as Conv1D does."""
    if not transposed:
        return F.linear(x, w, bias)
    rows = x.reshape(-1, x.shape[-1])
    y = rows.mm(w) if bias is None else torch.addmm(bias, rows, w)
    return y.reshape(*x.shape[:-1], w.shape[-1])


def check_attention(
    captures: Captures,
    *,
    compute: Attention | None = None,
    layout: str = "bhsd",
    output_layout: str | None = None,
    tolerance: float = 1e-6,
) -> Counter[str]:
    """Check every attention; returns how many of "O", "dQ", "dK" and "dV" were compared.

    Args:
        captures: of which the calls with all their tensors are checked.
        compute: O from q, k and v, [..., heads, positions, size] all; default `attention`, unmasked.
        layout: of q, k and v: bhsd, bshd or sbhd.
        output_layout: of O and dO, also with the heads joined: bs(hd), sb(hd); default: layout.
        tolerance: allowed relative error. 0.0 asks for equality: let `compute` do what the model did.
    """
    checker, compute = _Checker(tolerance), compute or attention
    outwards = output_layout or layout
    for call, tensors in captures.calls("attention").items():
        if not {"query", "key", "value"} <= tensors.keys():
            continue
        q, k, v = (_inwards(tensors[name], layout).requires_grad_(True) for name in ("query", "key", "value"))
        o = compute(q, k, v)
        if "output" in tensors:
            checker.equal("O", call, _inwards(tensors["output"], outwards, q.shape[-3]), o.detach())
        do = tensors.get("backward grad_output")
        if do is None:
            continue
        gradients = torch.autograd.grad(o, (q, k, v), _inwards(do, outwards, q.shape[-3]).to(o.dtype))
        for what, name, truth in zip(("dQ", "dK", "dV"), ("query", "key", "value"), gradients, strict=True):
            found = tensors.get(f"backward grad_{name}")
            if found is not None:
                checker.equal(what, call, _inwards(found, layout), truth)
    return checker.done


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """softmax(QKᵀ·scale + mask)·V in float64, of q's dtype at the end; k and v may have fewer heads than q."""
    repeat = q.shape[-3] // k.shape[-3] if q.ndim > 3 else 1
    k, v = (t.repeat_interleave(repeat, -3) if repeat > 1 else t for t in (k, v))
    scores = q.double() @ k.double().transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    return (scores.softmax(-1) @ v.double()).to(q.dtype)


def _inwards(tensor: Tensor, layout: str, heads: int = 0) -> Tensor:
    """As [batch, heads, positions, size]; a detached tensor."""
    if layout.endswith("(hd)"):
        tensor, layout = tensor.unflatten(-1, (heads, -1)), layout.replace("(hd)", "hd")
    return tensor.detach() if layout == "bhsd" else tensor.detach().permute(*map(layout.index, "bhsd"))


def controls(captures: Captures, *tensor_names: str) -> Iterator[Captures]:
    """Runs that went wrong: for each tensor name one with two moments swapped, one with a value overwritten.

    Every one of them must be found out: `with pytest.raises(Mismatch): check_linear(wrong)`.
    """
    for name in tensor_names:
        mine = [i for i, entry in enumerate(captures.entries) if entry.record.tensor_name == name]
        pairs = (
            (i, j)
            for i in mine
            for j in mine
            if i < j and _swappable(captures.entries[i], captures.entries[j])
        )
        i, j = next(pairs)
        swapped, overwritten = copy.copy(captures.entries), copy.copy(captures.entries)
        swapped[i] = captures.entries[i]._replace(tensor=captures.entries[j].tensor)
        swapped[j] = captures.entries[j]._replace(tensor=captures.entries[i].tensor)
        overwritten[i] = captures.entries[i]._replace(tensor=captures.entries[i].tensor.relu())
        yield Captures(swapped)
        yield Captures(overwritten)


def _swappable(one: Entry, other: Entry) -> bool:
    return (
        one.record.call[:3] == other.record.call[:3]
        and one.record.operation == other.record.operation
        and one.tensor.shape == other.tensor.shape
        and not torch.equal(one.tensor, other.tensor)
    )
