"""A rank of four that captures distributed tensors, and tells what `full_tensor()` says they are.

    python dtensor_job.py FILE

FILE.<rank>.pt: the whole tensors by their names in the capture; data parallel ranks have other activations.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import capd_client
from tests.kit.jobs.groups import leave_group

WIDTH, HIDDEN, NARROW, ROWS = 7, 10, 2, 3
"""HIDDEN: 5 for each tensor parallel rank, of which FSDP deals out 3 and 2. NARROW: 1, dealt out as 1 and 0."""

told: dict[str, Tensor] = {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.narrow, self.back = nn.Linear(WIDTH, NARROW), nn.Linear(NARROW, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        return x + self.back(self.narrow(x))  # type: ignore[no-any-return]


def tell(tensor: Any, name: str) -> None:
    """Capture a distributed tensor, and say what it is as a whole."""
    capd_client.capture(tensor, tensor_name="part", module=name)
    told[name] = tensor.detach().full_tensor().clone()


def train(mesh: Any) -> None:
    """One step of TP2 × FSDP2: sharded weights, their gradients, and activations."""
    torch.manual_seed(3)
    model = Block()
    column, row = ColwiseParallel(use_local_output=False), RowwiseParallel()
    parallelize_module(model, mesh["tp"], {"up": column, "down": row, "narrow": column, "back": row})
    fully_shard(model, mesh=mesh["dp"])
    for name, module in (("up", model.up), ("narrow", model.narrow)):
        module.register_forward_hook(lambda _, args, output, name=name: tell(output, f"activation.{name}"))
    capd_client.watch(model, steps="all", tensors=("input", "weight", "output", "grad_output", "grad_weight"))
    for name, parameter in model.named_parameters():
        tell(parameter, f"sharded.{name}")
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    model(torch.randn(ROWS, WIDTH, generator=generator)).square().sum().backward()
    for name, parameter in model.named_parameters():
        tell(parameter.grad, f"gradient.{name}")


def deal_out(mesh: Any) -> None:
    """Tensors on the mesh by every pair of placements, of sizes that cannot be divided."""
    generator = torch.Generator().manual_seed(9)
    kinds: dict[str, Placement] = {"s0": Shard(0), "s1": Shard(1), "r": Replicate()}
    for first, outer in kinds.items():
        for second, inner in kinds.items():
            for dtype in (torch.float32, torch.bfloat16):
                whole = torch.randn(5, 3, generator=generator).to(dtype)
                name = f"dealt.{first}.{second}.{str(dtype)[6:]}"
                tell(distribute_tensor(whole, mesh, [outer, inner]), name)
    own = torch.Generator().manual_seed(dist.get_rank())
    for reduction in ("sum", "avg"):
        term = torch.randn(4, 3, generator=own)
        tell(DTensor.from_local(term, mesh["tp"], [Partial(reduction)]), f"term.{reduction}")


def main(path: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    train(mesh)
    deal_out(mesh)
    torch.save(told, path.with_suffix(f".{dist.get_rank()}.pt"))
    capd_client.close()
    leave_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
