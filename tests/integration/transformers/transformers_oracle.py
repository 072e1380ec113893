"""What a run must hold, computed from a model's configuration; and what its tensors must be, by algebra among them.

`expected` says every record of every series: its key, shape and moment. `errors` computes each product anew from its
captured operands, the gradients from the captured dY, what flows unchanged from one product to the next, and says how
far off each is, relative to its size. No reference implementation, no hook, and no copy of the model is involved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import capd
from tests.integration.transformers.transformers_products import EXPERTS, TOP_K, Product

At = tuple[int, int, int]  # iteration, micro-batch, call
Name = tuple[str, str, str]  # module, component, tensor

FORWARD = ("query", "key", "value", "input", "offsets", "weight", "output")


@dataclass(frozen=True)
class Series:
    """Everything that a series' key says, and its records."""

    layer: int | None
    stack: str
    layer_type: str
    operation: str
    phase: str
    records: frozenset[tuple[At, tuple[int, ...]]]


def expected(
    products: Iterable[Product],
    *,
    steps: Iterable[int],
    micro_batches: int,
    tensors: Iterable[str] | None = None,
) -> dict[Name, Series]:
    """All series of a run. tensors: those that were asked for; default all."""
    found = {}
    ats = [(step, micro_batch, 0) for step in steps for micro_batch in range(micro_batches)]
    for product in products:
        for name, shape in _tensors(product):
            if tensors is not None and name not in tensors:
                continue
            once = name == "weight"
            records = frozenset((at, shape) for at in ats if not (once and at[1]))
            operation = "backward" if name.startswith("grad_") else "forward"
            before = name in ("output", "grad_output")
            phase = "pre" if before == (operation == "backward") else "post"
            layer_type = "attention" if product.component == "FA" else "linear"
            found[product.module, product.component, name] = Series(
                product.layer, product.stack, layer_type, operation, phase, records
            )
    return found


def _tensors(product: Product) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in product.shapes.items():
        yield name, shape
        if name != "offsets" and f"grad_{name}" not in product.lacks:
            yield f"grad_{name}", shape


class Captured:
    """A run as the store holds it."""

    def __init__(self, run: Path) -> None:
        self.series: dict[Name, Series] = {}
        self.twice: list[Any] = []
        self.values: dict[Name, dict[At, Tensor]] = {}
        self.attributes: dict[Name, dict[str, Any]] = {}
        self.metadata: dict[Name, dict[At, dict[str, Any]]] = {}
        for series in capd.open(run).series:
            key, records = series.key, list(series.records)
            name = (key.module, key.component, key.tensor_name)
            ats = [((r.iteration, r.micro_batch, r.call), r.shape) for r in records]
            self.twice += [(name, at) for at, count in Counter(at for at, _ in ats).items() if count > 1]
            before = self.series.get(name)  # larger records are a variant of the series
            both = frozenset(ats).union(before.records if before else ())
            self.twice += [name] * (len(both) < len(ats) + len(before.records if before else ()))
            self.series[name] = Series(key.layer, key.stack, key.layer_type, key.operation, key.phase, both)
            self.values.setdefault(name, {}).update({at: series.torch(i) for i, (at, _) in enumerate(ats)})
            self.attributes[name] = series.attributes
            metadata = {at: r.metadata for (at, _), r in zip(ats, records, strict=True)}
            self.metadata.setdefault(name, {}).update(metadata)

    def get(self, product: Product, tensor: str, at: At) -> Tensor | None:
        """As [batch, sequence, heads, head] where it is the output of an attention."""
        held = self.values.get((product.module, product.component, tensor), {})
        found = held.get((at[0], 0, 0) if tensor == "weight" else at)
        turned = product.heads_first and tensor in ("output", "grad_output")
        return found.transpose(1, 2) if found is not None and turned else found


def off(found: Tensor, right: Tensor) -> float:
    """The largest difference, relative to the largest element; 1 and more: another tensor altogether."""
    found, right = found.double(), right.double()
    if found.shape != right.shape:
        return float("inf")
    difference = (found - right).abs().max().item() if found.numel() else 0.0
    return difference / max(right.abs().max().item(), 1e-30) if difference else 0.0


def errors(products: list[Product], held: Captured) -> dict[str, float]:
    """The largest error of each law, by its name; laws whose tensors are not there are left out."""
    worst: dict[str, float] = {}
    by_name = {p.module: p for p in products if p.component != "FA"}
    for product in products:
        ats = held.values.get((product.module, product.component, "output"), {})
        for at in ats:
            for law, error in _laws(product, held, at, by_name):
                worst[law] = max(worst.get(law, 0.0), error)
    return worst


def _laws(
    product: Product, held: Captured, at: At, by_name: dict[str, Product]
) -> Iterator[tuple[str, float]]:
    if product.component == "FA":
        yield from _attention_laws(product, held, at)
        yield from _neighbours(product, held, at, by_name)
    elif product.component == "grouped_linear":
        yield from _grouped_laws(product, held, at)
    else:
        yield from _linear_laws(product, held, at)


def _linear_laws(product: Product, held: Captured, at: At) -> Iterator[tuple[str, float]]:
    x, weight, y, dy, dx, dw = (
        held.get(product, name, at)
        for name in ("input", "weight", "output", "grad_output", "grad_input", "grad_weight")
    )
    assert x is not None
    assert weight is not None
    assert y is not None
    weight = weight.T if product.transposed else weight
    residue = (y - F.linear(x, weight)).flatten(0, -2)
    if residue.any():  # a bias: the same for every row
        yield "Y = XWᵀ + b", off(residue, residue.mean(0).expand_as(residue)) * _ratio(residue, y)
    else:
        yield "Y = XWᵀ", 0.0
    if dy is None:
        return
    if dx is not None:
        yield "dX = dYW", off(dx, dy @ weight)
    if dw is not None and not product.tied:
        right = dy.flatten(0, -2).T @ x.flatten(0, -2)
        yield "dW = dYᵀX", off(dw.T if product.transposed else dw, right)


def _ratio(part: Tensor, whole: Tensor) -> float:
    return (part.abs().max() / whole.abs().max()).item()


def _attention_laws(product: Product, held: Captured, at: At) -> Iterator[tuple[str, float]]:
    names = ("query", "key", "value")
    q, k, v = (held.get(product, name, at) for name in names)
    output, dy = (held.get(product, name, at) for name in ("output", "grad_output"))
    assert q is not None
    assert k is not None
    assert v is not None
    assert output is not None
    operands = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    right = attend(*operands, scale=product.scale, causal=product.causal, bias=product.bias).transpose(1, 2)
    yield "O = softmax(QKᵀs)V", off(output, right.detach())
    if dy is not None:
        gradients = torch.autograd.grad(right, operands, dy.double())
        for name, gradient in zip(names, gradients, strict=True):
            found = held.get(product, f"grad_{name}", at)
            if found is not None:
                yield "dQ, dK, dV", off(found, gradient)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, bias: Tensor | None = None
) -> Tensor:
    """Attention as it is defined. Query heads share keys in groups of neighbours."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * scale + (0.0 if bias is None else bias)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v


def _neighbours(
    product: Product, held: Captured, at: At, by_name: dict[str, Product]
) -> Iterator[tuple[str, float]]:
    """What flows between the attention and the linears around it, unchanged: forward, and backward where captured."""
    names = [name for name, module in zip(("query", "key", "value"), product.source, strict=False) if module]
    for name in names:
        module = product.source[("query", "key", "value").index(name)]
        for way in ("", "grad_"):
            found, whole = held.get(product, way + name, at), held.get(by_name[module], f"{way}output", at)
            if found is None or whole is None:
                continue
            if product.source.count(module) == 3:
                whole = whole.chunk(3, -1)[("query", "key", "value").index(name)]
            flat = found.transpose(1, 2).flatten(2)
            yield f"{way}{name} = {way}output of its linear", off(flat, whole.reshape(flat.shape))
    after = by_name[product.target]
    for mine, its in (("output", "input"), ("grad_output", "grad_input")):
        found, whole = held.get(product, mine, at), held.get(after, its, at)
        if found is not None and whole is not None:
            yield f"{mine} = {its} of the next linear", off(found.flatten(2), whole)


def _grouped_laws(product: Product, held: Captured, at: At) -> Iterator[tuple[str, float]]:
    x, ends, weight, y = (held.get(product, name, at) for name in ("input", "offsets", "weight", "output"))
    dy, dx, dw = (held.get(product, f"grad_{name}", at) for name in ("output", "input", "weight"))
    assert x is not None
    assert ends is not None
    assert weight is not None
    assert y is not None
    first = 0
    for expert, end in enumerate(ends.tolist()):
        rows, w = slice(first, end), weight[expert]
        first = end
        yield "experts: Y = XWᵀ", off(y[rows], x[rows] @ w.T)
        if dy is not None and dx is not None and dw is not None:
            yield "experts: dX = dYW", off(dx[rows], dy[rows] @ w)
            yield "experts: dW = dYᵀX", off(dw[expert], dy[rows].T @ x[rows])
    yield "experts: every row", float(first != len(x))


def routed(held: Captured, block: str, at: At) -> tuple[float, float]:
    """How far the experts' rows and offsets are from what the router's own output says."""
    tensors = held.values
    x = tensors[f"{block}.gate", "linear", "input"][at]
    by_expert, order = chosen(held, block, at).flatten().sort()
    ends = torch.bincount(by_expert, minlength=EXPERTS).cumsum(0)
    experts = f"{block}.experts.gate_up_proj"
    return (
        off(tensors[experts, "grouped_linear", "input"][at], x[order // TOP_K]),
        off(tensors[experts, "grouped_linear", "offsets"][at], ends),
    )


def chosen(held: Captured, block: str, at: At) -> Tensor:
    """The experts that the router chose for each token: [tokens, TOP_K]."""
    logits = held.values[f"{block}.gate", "linear", "output"][at]
    return logits.float().softmax(-1).topk(TOP_K, -1).indices


def loss_gradient(logits: Tensor, labels: Tensor, items: int) -> Tensor:
    """dY of the last linear of a causal model: what its own output and this micro-batch's labels make it."""
    probabilities = logits.double().softmax(-1)
    probabilities[:, :-1] -= F.one_hot(labels[:, 1:], logits.shape[-1])
    probabilities[:, -1] = 0
    return probabilities / items
