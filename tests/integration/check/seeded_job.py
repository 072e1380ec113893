"""A job of linears in bfloat16, each with one bug in its product or in a gradient; `sound` has none."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BUGS = ("sound", "times105", "times101", "stale_row", "half_tokens", "quarter", "twice")
TOKENS, WIDTH, STALE = 512, 256, 77


class Product(torch.autograd.Function):
    """Y = X Wᵀ + b, with a bug."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, bug: str, before: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.bug = bug
        y = _LINEAR(x, w, b)
        if bug.startswith("times1"):
            y = (y.float() * (int(bug[5:]) / 100)).to(y.dtype)
        if bug == "stale_row":
            kept = y.clone()
            if before:
                y[STALE] = before.pop()[STALE]
            before.append(kept)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        rows = slice(0, TOKENS // 2) if ctx.bug == "half_tokens" else slice(None)
        dw = g[rows].t() @ x[rows]
        dx = g @ w
        return (
            (dx * 2 if ctx.bug == "twice" else dx),
            (dw / 4 if ctx.bug == "quarter" else dw),
            g.sum(0),
            None,
            None,
        )


_LINEAR = F.linear


class Model(nn.Module):
    """One linear for each bug, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleDict({bug: nn.Linear(WIDTH, WIDTH) for bug in BUGS})

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears.values():
            x = x + F.gelu(linear(x))
        return x


def main() -> None:
    import capd_client

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model().to(torch.bfloat16)
    bug_of = {linear.weight.data_ptr(): bug for bug, linear in model.linears.items()}
    before: list[Tensor] = []

    def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        found: Any = Product.apply(x, w, b, bug_of[w.data_ptr()], before)
        return found

    F.linear = linear
    tensors = ("input", "weight", "output", "grad_output", "grad_input", "grad_weight")
    handle = capd_client.watch(model, steps="all", tensors=tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
    handle.remove()
    capd_client.close()


if __name__ == "__main__":
    sys.exit(main())
