"""A training script, most modes of which know nothing of capd. Prints its losses and what it saw around it, in JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.data import DataLoader, Dataset

STEPS, MICRO_BATCHES, LAYERS = 3, 2, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


class Data(Dataset[tuple[Tensor, bool]]):
    """Batches, and whether the process that makes them has anything of a capture."""

    def __len__(self) -> int:
        return STEPS * MICRO_BATCHES

    def __getitem__(self, at: int) -> tuple[Tensor, bool]:
        return torch.randn(5, 8, generator=torch.Generator().manual_seed(at)), "capd_client" in sys.modules


def batches() -> list[Tensor]:
    return [Data()[at][0] for at in range(len(Data()))]


def train(call: Callable[[Tensor], Tensor], model: nn.Module, data: Iterable[Tensor]) -> list[str]:
    """The losses, exactly."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for at, x in enumerate(data):
        loss = call(x).square().mean()
        losses.append(loss.item().hex())
        if model.training:
            loss.backward()
            if at % MICRO_BATCHES == MICRO_BATCHES - 1:
                optimizer.step()
                optimizer.zero_grad()
    return losses


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def plain() -> dict[str, Any]:
    """With a DataLoader's worker and a child, which train nothing."""
    in_workers = []

    def data() -> Iterable[Tensor]:
        for x, in_worker in DataLoader(Data(), batch_size=None, num_workers=1):
            in_workers.append(in_worker)
            yield x

    code = "import sys; print('capd_client' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    model = net()
    losses = train(model, model, data())
    return {"losses": losses, "workers": any(in_workers[:1]), "child": child.stdout.strip()}


def ddp() -> dict[str, Any]:
    torch.distributed.init_process_group("gloo")
    model = net()
    losses = train(nn.parallel.DistributedDataParallel(model), model, batches())
    torch.distributed.destroy_process_group()
    return {"losses": losses}


def compiled() -> dict[str, Any]:
    """Three models, compiled in three ways, that train together."""
    first, in_place, in_function = net(), net(), net()
    whole = torch.compile(first, backend="aot_eager", fullgraph=True)
    in_place.compile(backend="aot_eager", fullgraph=True)
    function = torch.compile(lambda x: in_function(x), backend="aot_eager", fullgraph=True)
    calls: list[tuple[Any, nn.Module]] = [(whole, first), (in_place, in_place), (function, in_function)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _, model in calls]
    for x in batches()[:3]:
        for call, _ in calls:
            call(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return {"frames": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


def watched_late() -> dict[str, Any]:
    model = net()
    model(torch.zeros(1, 8))  # a dry run, before the script says what it wants
    import capd_client

    capd_client.watch(model, steps="1", select="head", tensors=("input",))
    return {"losses": train(model, model, batches())}


def captures() -> dict[str, Any]:
    import capd_client

    def call(x: Tensor) -> Tensor:
        capd_client.capture(x, tensor_name="x")
        return model(x)

    model = net()
    return {"losses": train(call, model, batches())}


def evaluates() -> dict[str, Any]:
    model = net().eval()
    return {"losses": train(model, model, batches())}


def main(mode: str) -> None:
    torch.set_num_threads(1)
    modes = (plain, ddp, compiled, watched_late, captures, evaluates)
    seen = next(function for function in modes if function.__name__ == mode)()
    hooks = len(torch_module._global_forward_pre_hooks)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({**seen, "hooks": hooks, "random": torch.rand(1).item()}))


if __name__ == "__main__":
    main(sys.argv[1])
