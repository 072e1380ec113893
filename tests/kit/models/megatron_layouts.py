"""Trains one tiny GPT by megatron-core in any layout: the same whole weights, and the same samples, in all of them.

    torchrun --nproc-per-node N -m tests.kit.models.megatron_layouts LAYOUT

LAYOUT is a `Layout` as JSON. Every parameter is filled by its name in the whole model and its position there, so no
layout needs a checkpoint. Data parallel rank r of n trains micro-batch m on sample m · n + r of the step. The gradient
of the whole batch is its sum over everything; only the factor 1 / micro-batches of Megatron's schedule depends on dp.

`plugin` names a function MODULE:FUNCTION, which is called with the chunks and the layout before training.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit.models import megatron_cpu
from tests.kit.models.megatron_context import gathering, positions

TENSORS = (
    "input", "weight", "output", "grad_output", "grad_input", "grad_weight",
    "query", "key", "value", "grad_query", "grad_key", "grad_value",
)  # fmt: skip
_DEFAULTS = {
    "deallocate_pipeline_outputs": True, "attention_dropout": 0.0, "hidden_dropout": 0.0, "add_bias_linear": False,
}  # fmt: skip
SAMPLES = 4
"""Micro-batches of one step over all data parallel ranks."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups, and the model.

    tp, pp, vpp, cp, ep: as Megatron's. etp: tensor parallelism of the experts; 0 is tp. sp: sequence parallelism.
    ranks: of the job; the rest is data parallel. groups: query groups of the attention. swiglu: a gated MLP.
    experts: of a MoE; 0 without. config: further fields of TransformerConfig. plugin: as in the module. vocabulary: of
    the tokenizer, if it is smaller than the padded one. norms: whether gradients of norms are captured by hand, after
    those of all ranks are added up.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    sp: bool = False
    ranks: int = 1
    groups: int = 4
    heads: int = 4
    swiglu: bool = True
    experts: int = 0
    layers: int = 4
    hidden: int = 16
    ffn: int = 24
    vocabulary: int = 0
    padded: int = 32
    sequence: int = 8
    rows: int = 2
    steps: int = 1
    dtype: str = "float32"
    lr: float = 0.01
    plugin: str = ""
    norms: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def dp(self) -> int:
        """The data parallel ranks."""
        return self.ranks // (self.tp * self.pp * self.cp)

    @property
    def micro_batches(self) -> int:
        """The micro-batches of one step on each rank."""
        return SAMPLES // self.dp

    def json(self) -> str:
        """The layout as an argument of the job."""
        return json.dumps(asdict(self))


def values(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """The whole parameter of this name in the whole model, the same in every process."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if len(shape) == 1:
        return (1 + 0.1 * drawn if name.endswith("weight") else 0.1 * drawn).to(dtype)
    return (drawn * (shape[-1] ** -0.5)).to(dtype)


def main(layout: Layout) -> None:
    megatron_cpu.install()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.get_world_size() == layout.ranks
    capd_client = importlib.import_module("capd_client")  # so that `capd run` watches nothing by itself
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if layout.vocabulary:
        # Megatron's training loop, were there one, has the tokenizer there.
        loop: Any = ModuleType("megatron.training.global_vars")
        loop._GLOBAL_TOKENIZER = SimpleNamespace(vocab_size=layout.vocabulary)
        sys.modules[loop.__name__] = loop
    chunks = begin(layout)
    handle = capd_client.watch(chunks, steps="all", tensors=TENSORS)
    if layout.plugin:
        module, _, function = layout.plugin.partition(":")
        getattr(importlib.import_module(module), function)(chunks, layout)
    train(layout, chunks)
    handle.remove()
    capd_client.close()
    dist.barrier()
    dist.destroy_process_group()


def begin(layout: Layout) -> list[Any]:
    """Set up Megatron's groups; the chunks of this rank, wrapped and filled."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
    )
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5)
    config = configuration(layout)
    chunks = []
    for stage in range(layout.vpp):
        model = stage_of(layout, config, stage)
        fill(model, layout)
        ddp = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
        chunks.append(DistributedDataParallel(config, ddp, model))

    def finalized(*args: Any, **kwargs: Any) -> None:
        finalize_model_grads(*args, **kwargs)
        if layout.norms:
            capture_norms(chunks, layout)

    config.finalize_model_grads_func = finalized
    config.no_sync_func = chunks[0].no_sync if len(chunks) == 1 else [chunk.no_sync for chunk in chunks]
    return chunks


def configuration(layout: Layout) -> Any:
    """Megatron's configuration of the model."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts: dict[str, Any] = {}
    if layout.experts:
        experts = {
            "num_moe_experts": layout.experts, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none", "moe_router_pre_softmax": True,
            "moe_ffn_hidden_size": layout.ffn,
        }  # fmt: skip
    dtype = getattr(torch, layout.dtype)
    return TransformerConfig(
        num_layers=layout.layers, hidden_size=layout.hidden, num_attention_heads=layout.heads,
        num_query_groups=layout.groups, ffn_hidden_size=layout.ffn, tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp, sequence_parallel=layout.sp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp, expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
        pipeline_dtype=dtype, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gated_linear_unit=layout.swiglu, activation_func=F.silu if layout.swiglu else F.gelu,
        normalization="RMSNorm", **{**_DEFAULTS, **experts, **layout.config},
    )  # fmt: skip


def stage_of(layout: Layout, config: Any, stage: int) -> Any:
    """One chunk of the model on this rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(num_experts=layout.experts or None, normalization="RMSNorm")
    if layout.cp > 1:
        spec.submodules.self_attention.submodules.core_attention = gathering()
    virtual: dict[str, Any] = {}
    if layout.vpp > 1:
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        virtual = {"ignore_virtual": False, "vp_stage": stage}
    at: dict[str, Any] = {"vp_stage": stage} if layout.vpp > 1 else {}
    return GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=layout.padded, max_sequence_length=layout.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(**virtual),
        post_process=parallel_state.is_pipeline_last_stage(**virtual),
        share_embeddings_and_output_weights=False, position_embedding_type="rope", **at,
    )  # fmt: skip


def fill(model: nn.Module, layout: Layout) -> None:
    """Give the parameters of a chunk their part of the whole model's."""
    from megatron.core import parallel_state

    for name, parameter in model.named_parameters():
        part = values(*whole_of(model, layout, name, parameter), parameter.dtype)
        if getattr(parameter, "tensor_model_parallel", False):
            rank, size = parallel_state.get_tensor_model_parallel_rank(), layout.tp
            if ".experts." in name:
                rank, size = parallel_state.get_expert_tensor_parallel_rank(), layout.etp or layout.tp
            dim = parameter.partition_dim
            blocks = part.chunk(2, dim) if is_gated(name, layout) else (part,)
            part = torch.cat([block.chunk(size, dim)[rank] for block in blocks], dim)
        with torch.no_grad():
            parameter.copy_(part)


def whole_of(model: nn.Module, layout: Layout, name: str, parameter: Tensor) -> tuple[str, tuple[int, ...]]:
    """The name of a parameter in the whole model, and its shape there."""
    from megatron.core import parallel_state

    words, module = name.split("."), model
    for at, word in enumerate(words[:-1]):
        module = module.get_submodule(word)
        if at and words[at - 1] == "layers":
            words[at] = str(int(module.layer_number) - 1)  # type: ignore[arg-type]
        if at and words[at - 1] == "local_experts":
            count = layout.experts // layout.ep
            words[at - 1] = str(int(word) + parallel_state.get_expert_model_parallel_rank() * count)
            words[at] = ""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        split = (layout.etp or layout.tp) if ".experts." in name else layout.tp
        shape[parameter.partition_dim] *= split  # type: ignore[attr-defined]
    return ".".join(word for word in words if word), tuple(shape)


def is_gated(name: str, layout: Layout) -> bool:
    return layout.swiglu and "linear_fc1" in name


def train(layout: Layout, chunks: list[Any]) -> None:
    """Some steps by Megatron's own schedule and optimizer."""
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if layout.dtype == "float32":
        adam = OptimizerConfig(optimizer="adam", lr=layout.lr, clip_grad=0.0, use_distributed_optimizer=False)
        optimizer = get_megatron_optimizer(adam, chunks)
    else:
        # Megatron's own wants parameters of other types on a GPU.
        optimizer = torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=layout.lr)
    schedule = get_forward_backward_func()
    data_rank = parallel_state.get_data_parallel_rank()
    for step in range(layout.steps):
        for chunk in chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        schedule(
            forward_step_func=lambda data, model: forward_step(data, model, layout),
            data_iterator=[batches(layout, data_rank, step) for _ in chunks],
            model=chunks,
            num_microbatches=layout.micro_batches,
            seq_length=layout.sequence,
            micro_batch_size=layout.rows,
            forward_only=False,
        )
        if isinstance(optimizer, torch.optim.SGD):
            for parameter in (p for chunk in chunks for p in chunk.parameters()):
                parameter.grad = parameter.main_grad.to(parameter.dtype)
        optimizer.step()


def capture_norms(chunks: list[Any], layout: Layout) -> None:
    """Capture the gradients of the norms, which all ranks of a stage should hold alike when they are final."""
    from megatron.core import parallel_state

    import capd_client

    rank = parallel_state.get_tensor_model_parallel_rank()
    placed = {"tp_rank": rank, "tp_size": layout.tp, "tp_placement": "R"}
    for name, parameter in ((name, p) for chunk in chunks for name, p in chunk.module.named_parameters()):
        if "norm" in name:
            module = name.rpartition(".")[0]
            capd_client.capture(
                parameter.main_grad, tensor_name="main_grad", module=module, operation="backward", phase="post",
                attributes=placed,
            )  # fmt: skip


def batches(layout: Layout, data_rank: int, step: int) -> Iterator[Tensor]:
    """Tokens of the micro-batches of one step, one longer than a sequence."""
    for micro_batch in range(layout.micro_batches):
        yield sample(layout, step, micro_batch * layout.dp + data_rank)


def sample(layout: Layout, step: int, number: int) -> Tensor:
    """Tokens [rows, sequence + 1] of one micro-batch of the whole step."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randint(
        0, layout.vocabulary or layout.padded, (layout.rows, layout.sequence + 1), generator=generator
    )


def forward_step(data: Iterator[Tensor], model: Any, layout: Layout) -> tuple[Tensor, Callable[..., Any]]:
    from megatron.core import parallel_state

    at = positions(layout.sequence, parallel_state.get_context_parallel_rank(), layout.cp)
    tokens = next(data)
    inputs, labels = tokens[:, at], tokens[:, at + 1]
    mask = torch.ones(1, 1, layout.sequence, layout.sequence, dtype=torch.bool).triu(1)
    output = model(inputs, at.expand_as(inputs), mask, labels=labels)
    return output, lambda losses: summed_loss(losses, layout)


def summed_loss(losses: Tensor, layout: Layout) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The sum over this rank's tokens, and the tokens of the whole micro-batch: the schedule divides by these."""
    tokens = torch.tensor(layout.rows * layout.sequence, dtype=torch.int)
    loss = losses.float().sum()
    return loss, tokens, {"loss": loss.detach().clone()}


if __name__ == "__main__":
    # A plugin that changes this module finds it under its own name.
    own: Any = importlib.import_module("tests.kit.models.megatron_layouts")
    own.main(own.Layout(**json.loads(sys.argv[1])))
