"""A job in tensor_saver's style: calls by hand in autograd functions, ranks and samples by its own rules.

    replaced_saver_job.py DIRECTORY

Writes its losses, and the bits of each tensor that it hands over, to DIRECTORY. The module that it imports the calls
from is IMPORT_FROM's.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS, MICRO_BATCHES, WIDTH = 2, 2, 16
saver: Any = importlib.import_module(os.environ.get("IMPORT_FROM", "capd_client.tensor_saver"))
handed_over: list[dict[str, Any]] = []


def note(returned: str | None, tensor: Tensor, **names: Any) -> None:
    bits = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    handed_over.append({**names, "reference": returned, "sha256": hashlib.sha256(bits).hexdigest()})


class Product(torch.autograd.Function):
    """A linear layer with the calls where tensor_saver had them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer_idx = layer
        quant_type = os.environ.get("CUSTOM_QUANT_TYPE", "hifp8")
        saved = saver.save_linear_tensors(
            input_tensor=x, weight=weight, quant_type=quant_type, operation="forward", layer_idx=layer,
            metadata={"use_bias": False, "dtype": x.dtype},
        )  # fmt: skip
        note(saved["input"], x, tensor_name="input", operation="forward", layer=layer)
        output = x @ weight.t()
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("LOCAL_RANK", 0))
        one = saver.save_tensor(
            tensor=output, layer_type="linear", operation="forward", quant_type=quant_type, tensor_name="output",
            layer_idx=layer, phase="post", component="linear", rank=rank,
        )  # fmt: skip
        note(one, output, tensor_name="output", operation="forward", layer=layer)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad_output,) = grads
        x, weight = ctx.saved_tensors
        saved = saver.save_linear_tensors(
            input_tensor=grad_output, weight=None, quant_type=os.environ.get("CUSTOM_QUANT_TYPE", "hifp8"),
            operation="backward", layer_idx=ctx.layer_idx,
        )  # fmt: skip
        note(saved["input"], grad_output, tensor_name="input", operation="backward", layer=ctx.layer_idx)
        return grad_output @ weight, grad_output.t() @ x, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer, weight in enumerate(self.weights):
            x = torch.tanh(Product.apply(x, weight, layer))
        return x


def main() -> None:
    directory = Path(sys.argv[1])
    torch.manual_seed(7)
    model = Model()
    # Before the group: what the first optimizer imports keeps a group that is there alive beyond its destruction, and
    # a thread of gloo's that lets go of a gradient while the interpreter ends aborts the process.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    saver.initialize_tensor_collection(iteration=0)
    for step in range(STEPS):
        saver.set_global_iteration(step)
        for micro_batch in range(MICRO_BATCHES):
            saver.set_global_sample_idx(micro_batch)
            loss = model(torch.randn(8, WIDTH, generator=generator)).square().sum()
            loss.backward()
            losses.append(loss.item().hex())
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    told = {"losses": losses, "rng": torch.get_rng_state().sum().item(), "handed_over": handed_over}
    (directory / f"rank{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
