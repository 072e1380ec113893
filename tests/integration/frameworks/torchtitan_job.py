"""A rank of torchtitan: its own Trainer and debug model on CPUs, first unwatched, then watched under the way's name.

    python torchtitan_job.py FILE [found]

found: a script that knows nothing of capd trains the way "single" alone, and keeps a method of the trainer before its
first forward, as one that times its micro-batches does. Otherwise the ways are those that the number of ranks allows
(`WAYS`). Losses and parameters must be the same bits in both; FILE.<rank> tells the losses. What torchtitan 0.3 asks of
a GPU is given in `use_cpus`, and its dataset is of made-up words; all else is torchtitan's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

STEPS, MICRO_BATCHES, ROWS, TOKENS, LAYERS = 2, 2, 2, 16, 2
VOCABULARY = 2048  # that of the debug model
WAYS: dict[int, dict[str, dict[str, Any]]] = {  # ranks → ways → fields of torchtitan's ParallelismConfig
    1: {"single": {}, "single_flex": {}},
    2: {
        "tp2": {"tensor_parallel_degree": 2, "spmd_backend": "partial_dtensor"},
        "tp2_flex": {"tensor_parallel_degree": 2, "spmd_backend": "partial_dtensor"},
        "fsdp2": {"data_parallel_shard_degree": 2, "spmd_backend": "partial_dtensor"},
    },
}
"""The default backend's sharded parameters ask for a newer fully_shard than that of torch 2.13."""


def use_cpus() -> None:
    """torchtitan takes a machine without an accelerator for one with a GPU."""
    from torchtitan.tools import utils

    memory = SimpleNamespace(total_memory=1 << 30)
    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        set_device=lambda device: None,
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_name=lambda device=None: "cpu",
        get_device_properties=lambda device: memory,
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda device: {},
        synchronize=lambda: None,
    )
    utils.get_local_device = lambda: torch.device("cpu")

    from torchtitan.distributed import utils as distributed

    distributed.set_pg_timeouts = lambda **_: None  # torch.distributed.set_timeout is newer than torch 2.13


def use_cpus_for_flex() -> None:
    """FlexAttention has no backward on CPUs: in place of the kernel, its product, of one document in each row."""
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.models.common import attention

    def kernel(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, **_: Any) -> tuple[Tensor, None]:
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -torch.inf).softmax(-1) @ v, None

    attention.FlexAttention.compiled_flex_attn = staticmethod(kernel)
    attention._compiled_create_block_mask = create_block_mask  # compiling takes longer than all else


def config_of(way: str, parallelism: dict[str, Any], directory: Path) -> Any:
    """The debug model's configuration, with fewer layers; its attention is FlexAttention unless it is replaced."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from tests.integration.frameworks.torchtitan_data import Tokens, Words

    config = llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:LAYERS]
    for layer in () if way.endswith("flex") else model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.dump_folder = str(directory)
    config.tokenizer, config.dataloader = Tokens.Config(), Words.Config()
    config.validator.enable = config.checkpoint.enable = False
    config.debug.seed = 0
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = ROWS, TOKENS, STEPS
    training.global_batch_size = ROWS * MICRO_BATCHES * parallelism.get("data_parallel_shard_degree", 1)
    training.mixed_precision_param = "float32"
    training.disable_cuda_graphs = True
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    return config


def train(config: Any, name: str, *, keeps: bool = False) -> list[str]:
    """All steps of torchtitan's own training; returns losses and a digest of the parameters."""
    trainer = config.build()
    if keeps:
        kept = trainer.forward_backward_step
        trainer.forward_backward_step = lambda *args, **kwargs: kept(*args, **kwargs)
    [model] = trainer.model_parts
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no sum that divides
    losses: list[str] = []
    log = trainer.metrics_processor.log
    trainer.metrics_processor.log = lambda step, *values, **more: (
        losses.extend(float(value).hex() for value in values[:3]), log(step, *values, **more)
    )  # fmt: skip
    handle = None
    if name:
        import capd_client
        from capd_client.protocol.kinds import ATTENTION, LINEAR

        handle = capd_client.watch(
            model, name=name, steps="all", tensors={*LINEAR.tensors, *ATTENTION.tensors}
        )
    trainer.train()
    trainer.close()
    if handle is not None:
        handle.remove()
    local = (getattr(p, "_local_tensor", p).detach() for p in model.parameters())
    return [*losses, *(float(p.double().sum()).hex() for p in local)]


def found(path: Path) -> None:
    use_cpus()
    use_cpus_for_flex()
    train(config_of("single", {}, path.parent), "", keeps=True)
    dist.destroy_process_group()


def main(path: Path) -> None:
    import capd_client  # so that `capd run` leaves it to this script what is watched

    use_cpus()
    use_cpus_for_flex()
    told = {}
    for name, parallelism in WAYS[int(os.environ["WORLD_SIZE"])].items():
        found = [train(config_of(name, parallelism, path.parent), watched) for watched in ("", name)]
        assert found[0] == found[1], f"{name}: watching changed the results"
        told[name] = found[1]
    path.with_suffix(f".{dist.get_rank()}").write_text(json.dumps(told))
    capd_client.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    (found if sys.argv[2:] == ["found"] else main)(Path(sys.argv[1]))
