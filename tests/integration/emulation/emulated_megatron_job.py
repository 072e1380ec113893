"""Megatron's layers with emulation, each rank with its part of the same operands; leaves what they compute.

torchrun --nproc-per-node N emulated_megatron_job.py RESULT

RESULT: directory for one file of tensors per rank, by case and name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.kit.models import megatron_cpu

SEQUENCE, BATCH, HIDDEN, FFN, HEADS, SIZE = 32, 2, 64, 128, 4, 32
RECIPE = {"linear": "mxfp8", "qk": "mxfp8", "pv": "mxfp4", "level": "exact"}
LINEARS = ("column", "column_sp", "column_frozen", "column_fused", "row", "row_sp")


def operands(case: str) -> dict[str, Tensor]:
    """The whole operands of a case, the same on every rank: input, weight [out, in] and the output's gradient."""
    generator = torch.Generator().manual_seed(len(case))
    if case == "attention":
        shape = (SEQUENCE, BATCH, HEADS, SIZE)
        names = ("query", "key", "value")
        found = {name: torch.randn(shape, generator=generator) for name in names}
        return {**found, "grad_output": torch.randn(SEQUENCE, BATCH, HEADS * SIZE, generator=generator)}
    wide, narrow = (HIDDEN, FFN) if case.startswith("column") else (FFN, HIDDEN)
    return {
        "input": torch.randn(SEQUENCE, BATCH, wide, generator=generator),
        "weight": torch.randn(narrow, wide, generator=generator) / 8,
        "grad_output": torch.randn(SEQUENCE, BATCH, narrow, generator=generator),
    }


def part(tensor: Tensor, axis: int) -> Tensor:
    """This rank's part along an axis, a leaf."""
    mine = tensor.chunk(dist.get_world_size(), axis)[dist.get_rank()]
    return mine.detach().clone().requires_grad_(tensor.is_floating_point())


def linear(case: str) -> dict[str, Tensor]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    import capd_client

    given, sequence = operands(case), case.endswith("_sp")
    column = case.startswith("column")
    options: dict[str, Any] = {"config": config(sequence), "init_method": torch.nn.init.zeros_, "bias": False}
    out, wide = given["weight"].shape
    if column:
        layer: Any = ColumnParallelLinear(wide, out, gather_output=False, **options)
    else:
        layer = RowParallelLinear(wide, out, input_is_parallel=True, skip_bias_add=False, **options)
    weight = part(given["weight"], 0 if column else 1)
    layer.weight.data.copy_(weight.data)
    if case == "column_frozen":
        layer.weight.requires_grad_(False)
    if case == "column_fused":
        layer.gradient_accumulation_fusion = True  # its kernel is for GPUs; this is what it leaves
        layer.weight.main_grad = torch.ones_like(layer.weight)
        layer.weight.grad_added_to_main_grad = False
    emulation = capd_client.emulate(layer, RECIPE)
    x = part(given["input"], 0 if sequence else 2) if sequence or not column else leaf(given["input"])
    if sequence and not column:
        x = part(given["input"], 2)
    output, _ = layer(x)
    gradient = part(given["grad_output"], 2) if column else given["grad_output"]
    output.backward(part(gradient, 0) if sequence and not column else gradient)
    found = {"output": output, "grad_input": x.grad, "weight": layer.weight}
    if layer.weight.grad is not None:
        found["grad_weight"] = layer.weight.grad
    if case == "column_fused":
        assert layer.weight.grad_added_to_main_grad
        found["main_grad"] = layer.weight.main_grad
    emulation.remove()
    with torch.no_grad():
        found["plain"] = layer(x)[0]
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def attention() -> dict[str, Tensor]:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    import capd_client

    given = operands("attention")
    layer = DotProductAttention(config(False), 1, AttnMaskType.causal, "self", attention_dropout=0.0)
    capd_client.emulate(layer, RECIPE)
    heads = {name: part(given[name], 2) for name in ("query", "key", "value")}
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    output = layer(*heads.values(), mask)
    output.backward(part(given["grad_output"], 2))
    found = {"output": output, **{f"grad_{name}": tensor.grad for name, tensor in heads.items()}}
    return {name: tensor.detach() for name, tensor in found.items() if tensor is not None}


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def config(sequence_parallel: bool) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1, hidden_size=HEADS * SIZE, num_attention_heads=HEADS, use_cpu_initialization=True,
        tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, perform_initialization=False,
    )  # fmt: skip


def main(result: Path) -> None:
    megatron_cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(5)
    found = {
        case: linear(case) for case in LINEARS if not (dist.get_world_size() == 1 and case.endswith("_sp"))
    }
    found["attention"] = attention()
    torch.save(found, result / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
