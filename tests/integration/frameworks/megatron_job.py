"""Trains tiny GPTs by megatron-core's own schedules, one mode after the other, captured and not captured.

    torchrun --nproc-per-node 2 megatron_job.py RESULT MODE ... | unwatched MODE

RESULT: directory for one JSON file per rank: the losses of every mode, with capture and without. Every mode is
watched under its own name, so that all of them lie in one store.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.kit.models import megatron_cpu
from tests.kit.models.megatron_context import gathering, positions

LAYERS, HIDDEN, HEADS, GROUPS, FFN = 4, 16, 4, 2, 24
VOCABULARY, SEQUENCE, MICRO_BATCH_SIZE = 32, 8, 2
STEPS, MICRO_BATCHES = 2, 4
EXPERTS = 4
TENSORS = (
    "input", "weight", "output", "grad_output", "grad_input", "grad_weight",
    "query", "key", "value", "grad_query", "grad_key", "grad_value",
)  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """One way to run the model: parallel sizes, and what else is configured.

    skipped: steps at which the optimizer does nothing, as after an overflow. resumed: the iteration that Megatron's
    training loop, were there one, would begin with. own: the job calls the model once by itself in front of every
    training step, and so behind an evaluation.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    own: bool = False
    skipped: tuple[int, ...] = ()
    resumed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def sp(self) -> bool:
        return bool(self.config.get("sequence_parallel"))

    @property
    def experts(self) -> int:
        return int(self.config.get("num_moe_experts", 0))

    @property
    def grouped(self) -> bool:
        """Whether one kernel multiplies all experts."""
        return bool(self.config.get("moe_grouped_gemm"))

    def layers(self, pp_rank: int, chunk: int) -> range:
        """The layers of a chunk, 0-based over the whole model."""
        count = LAYERS // (self.pp * self.vpp)
        first = chunk * LAYERS // self.vpp + pp_rank * count
        return range(first, first + count)


MOE = {"num_moe_experts": EXPERTS, "moe_router_topk": 1, "moe_token_dispatcher_type": "alltoall",
       "moe_router_load_balancing_type": "none", "moe_router_pre_softmax": True}  # fmt: skip
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MODES = {
    "dp2": Mode(),
    "tp2": Mode(tp=2),
    "tp2sp": Mode(tp=2, config={"sequence_parallel": True}),
    "pp2": Mode(pp=2),
    "vpp": Mode(pp=2, vpp=2, skipped=(0,)),
    "full": Mode(pp=2, config=FULL),
    "selective": Mode(config={"recompute_granularity": "selective"}),
    "moe": Mode(config=MOE),
    "moefull": Mode(pp=2, config={**MOE, **FULL}, resumed=1000),
    "ep2": Mode(ep=2, config=MOE),
    "ep2allgather": Mode(ep=2, config={**MOE, "moe_token_dispatcher_type": "allgather"}),
    "grouped": Mode(config={**MOE, "moe_grouped_gemm": True}),
    "cp2": Mode(cp=2),
    "own": Mode(own=True),
}


def main(result: Path, names: list[str]) -> None:
    megatron_cpu.install()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, dict[str, list[str]]] = {}
    if names[0] == "unwatched":  # a job that knows nothing of capd
        results[names[1]] = {"on": [loss.hex() for loss in train(MODES[names[1]])]}
        names = []
    else:
        importlib.import_module("capd_client")  # so that `capd run` watches nothing by itself
    logging.getLogger("megatron").setLevel(logging.ERROR)  # one generator stands for those of CPU and GPU
    for name in names:
        mode = MODES[name]
        losses = {
            "off": [loss.hex() for loss in train(mode)],
            "on": [loss.hex() for loss in train(mode, watch=name)],
        }
        results[name] = losses
    (result / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def train(mode: Mode, watch: str = "") -> list[float]:
    """Losses of all micro-batches, those of the evaluation passes between the steps too; [] on first stages."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mode.tp,
        pipeline_model_parallel_size=mode.pp,
        virtual_pipeline_model_parallel_size=mode.vpp if mode.vpp > 1 else None,
        context_parallel_size=mode.cp,
        expert_model_parallel_size=mode.ep,
    )
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5)
    chunks = build(mode)
    optimizer = make_optimizer(chunks)
    schedule = get_forward_backward_func()  # before the watch, as in Megatron's own loop
    loop = ModuleType("megatron.training.global_vars")
    if mode.resumed is not None:
        sys.modules[loop.__name__] = loop
    handle = None
    if watch:
        import capd_client

        handle = capd_client.watch(chunks, name=watch, steps="all", tensors=TENSORS)
    losses: list[float] = []
    data_rank = parallel_state.get_data_parallel_rank()
    for step in range(STEPS):
        loop._GLOBAL_ARGS = SimpleNamespace(curr_iteration=(mode.resumed or 0) + step)  # type: ignore[attr-defined]
        for forward_only in (False, True):
            for chunk in chunks:
                chunk.train(not forward_only or step == 1)  # some forget it
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            if mode.own and not forward_only:
                output, loss_of = forward_step(batches(data_rank, step), chunks[0])
                loss_of(output)[0].backward()
            reduced = schedule(
                forward_step_func=forward_step,
                data_iterator=[batches(data_rank, step) for _ in chunks],
                model=chunks,
                num_microbatches=MICRO_BATCHES,
                seq_length=SEQUENCE,
                micro_batch_size=MICRO_BATCH_SIZE,
                forward_only=forward_only,
            )
            losses += [float(loss["loss"]) for loss in reduced]
            if not forward_only and step not in mode.skipped:
                optimizer.step()
    sys.modules.pop(loop.__name__, None)
    if handle is not None:
        handle.remove()
    parallel_state.destroy_model_parallel()
    parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None  # which 0.12 forgets
    return losses


def build(mode: Mode) -> list[Any]:
    """The chunks of this rank, wrapped as megatron's own training script wraps them."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS,
        ffn_hidden_size=FFN, tensor_model_parallel_size=mode.tp, pipeline_model_parallel_size=mode.pp,
        virtual_pipeline_model_parallel_size=mode.vpp if mode.vpp > 1 else None,
        context_parallel_size=mode.cp, expert_model_parallel_size=mode.ep,
        pipeline_dtype=torch.float32, use_cpu_initialization=True, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        apply_rope_fusion=False, add_bias_linear=False, init_method_std=0.5, attention_dropout=0.0, hidden_dropout=0.1,
        deallocate_pipeline_outputs=True, **mode.config,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=mode.config.get("num_moe_experts"), moe_grouped_gemm=mode.grouped
    )
    if mode.cp > 1:
        spec.submodules.self_attention.submodules.core_attention = gathering()
    chunks = []
    for stage in range(mode.vpp):
        virtual: dict[str, Any] = {}
        if mode.vpp > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
            virtual = {"ignore_virtual": False}
            if "vp_stage" in GPTModel.__init__.__annotations__:
                virtual["vp_stage"] = stage
        at: dict[str, Any] = {"vp_stage": stage} if "vp_stage" in virtual else {}
        model = GPTModel(
            config=config, transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(**virtual),
            post_process=parallel_state.is_pipeline_last_stage(**virtual),
            share_embeddings_and_output_weights=False, position_embedding_type="rope", **at,
        )  # fmt: skip
        ddp = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
        starve_last_expert(model)
        if mode.grouped:
            call_experts_bf16(model)
        chunks.append(DistributedDataParallel(config, ddp, model))
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = chunks[0].no_sync if len(chunks) == 1 else [chunk.no_sync for chunk in chunks]
    return chunks


def starve_last_expert(model: torch.nn.Module) -> None:
    """Its logit is the mean of two others', so no token chooses it."""
    for name, module in model.named_modules():
        if name.endswith(".router"):
            with torch.no_grad():
                module.weight[-1] = module.weight[:2].mean(0)


def call_experts_bf16(model: torch.nn.Module) -> None:
    """GroupedMLP asserts that its configuration says so, and computes in whatever dtype it is given."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.config = copy.copy(module.config)
            module.config.bf16 = True


def make_optimizer(chunks: list[Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=0.0, use_distributed_optimizer=False)
    return get_megatron_optimizer(config, chunks)


def batches(data_rank: int, step: int) -> Iterator[torch.Tensor]:
    """Tokens of the micro-batches of one step, one longer than a sequence."""
    for micro_batch in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(1000 * data_rank + 10 * step + micro_batch)
        yield torch.randint(0, VOCABULARY, (MICRO_BATCH_SIZE, SEQUENCE + 1), generator=generator)


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    from megatron.core import parallel_state

    at = positions(
        SEQUENCE, parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    )
    tokens = next(data)
    inputs, labels = tokens[:, at], tokens[:, at + 1]
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    output = model(inputs, at.expand_as(inputs), mask, labels=labels)
    return output, mean_loss


def mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
