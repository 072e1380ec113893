"""Trains in torchtitan the model of `tests.kit.models.megatron_layouts`, with the same weights and samples.

    torchrun --nproc-per-node N -m tests.kit.models.titan_layouts LAYOUT WAY [wrong]

LAYOUT is a `Layout` as JSON, of one rank. WAY is one of `WAYS`. torchtitan's Trainer trains its own Llama on CPUs, with
what `tests.integration.frameworks.torchtitan_job` gives it in place of a GPU. Its adapter converts the weights from
those of Hugging Face. wrong: it forgets that torchtitan's heads have rotary pairs next to each other.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.integration.frameworks import torchtitan_job as job
from tests.kit.models.llama_layouts import TENSORS, converted
from tests.kit.models.megatron_layouts import SAMPLES, Layout, sample

WAYS: dict[str, dict[str, Any]] = {"single": {}, **{way: job.WAYS[2][way] for way in ("tp2", "fsdp2")}}
"""The fields of torchtitan's ParallelismConfig."""
WRAPPER = "_checkpoint_wrapped_module."


def main(layout: Layout, way: str, *, wrong: bool) -> None:
    torch.set_num_threads(1)
    capd_client = importlib.import_module("capd_client")  # so that `capd run` watches nothing by itself
    job.use_cpus()
    with tempfile.TemporaryDirectory(prefix="capd-titan-") as name:
        config = configuration(layout, WAYS[way], Path(name))
        trainer = config.build()
        [model] = trainer.model_parts
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)  # gloo has no sum that divides
        load(model, config.model_spec, layout, wrong=wrong)
        handle = capd_client.watch(model, steps="all", tensors=TENSORS)
        trainer.train()
        trainer.close()
        handle.remove()
    capd_client.close()
    dist.destroy_process_group()


def configuration(layout: Layout, parallelism: dict[str, Any], directory: Path) -> Any:
    """torchtitan's debug configuration with this model, these samples, and the loss in one piece."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3TransformerBlock

    config = job.config_of("logical", parallelism, directory)
    model = config.model_spec.model
    kept = model.layers[0]
    drawn = {"weight": nn.init.zeros_, "bias": nn.init.zeros_}
    norm = type(kept.attention_norm)(normalized_shape=layout.hidden, param_init=drawn)
    model.dim, model.vocab_size, model.norm = layout.hidden, layout.padded, norm
    model.tok_embeddings.num_embeddings = model.lm_head.out_features = layout.padded
    model.tok_embeddings.embedding_dim = model.lm_head.in_features = layout.hidden
    rope = ComplexRoPE.Config(
        dim=layout.hidden // layout.heads, max_seq_len=layout.sequence, theta=10_000.0, scaling="none"
    )
    model.layers = [
        Llama3TransformerBlock.Config(
            attention_norm=norm, ffn_norm=norm,
            attention=make_gqa_config(
                dim=layout.hidden, n_heads=layout.heads, n_kv_heads=layout.groups, wqkv_param_init=drawn,
                wo_param_init=drawn, inner_attention=ScaledDotProductAttention.Config(), fuse_qkv=True, rope=rope,
            ),
            feed_forward=make_ffn_config(
                dim=layout.hidden, hidden_dim=layout.ffn, w1_param_init=drawn, w2w3_param_init=drawn
            ),
        )
        for _ in range(layout.layers)
    ]  # fmt: skip
    config.loss = CrossEntropyLoss.Config(global_vocab_size=layout.padded)
    # With sequence parallelism, the loss must be cut into chunks.
    config.parallelism.enable_sequence_parallel = False
    config.dataloader = samples_of(layout)
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = layout.rows, layout.sequence, layout.steps
    training.global_batch_size = layout.rows * SAMPLES
    return config


def samples_of(layout: Layout) -> Any:
    """The configuration of a loader of the samples: data parallel rank r of n has sample m · n + r in micro-batch m."""
    from tests.integration.frameworks.torchtitan_data import Words

    class Samples(Words):
        @dataclass(kw_only=True, slots=True)
        class Config(Words.Config):
            pass

        def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, **_: Any) -> None:
            self._rank, self._size = dp_rank, dp_world_size

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            positions = torch.arange(layout.sequence).expand(layout.rows, -1)
            for step in range(layout.steps):
                for number in range(self._rank, SAMPLES, self._size):
                    tokens = sample(layout, step, number)
                    yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:].contiguous()

    return Samples.Config()


def load(model: Any, spec: Any, layout: Layout, *, wrong: bool) -> None:
    """Give the parameters, which may be distributed, their values in the whole model."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    adapter = spec.state_dict_adapter(spec.model, None)
    if wrong:
        adapter._reverse_permute = lambda weight, *_: weight
    state = adapter.from_hf(converted(layout))
    for name, module in model.named_modules():
        if name.endswith("qkv_linear"):
            module._merge_qkv_on_load(module, state, f"{name.replace(WRAPPER, '')}.")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = state.pop(name.replace(WRAPPER, ""))
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
    assert not state, f"torchtitan's model has no {sorted(state)[0]}"


if __name__ == "__main__":
    main(Layout(**json.loads(sys.argv[1])), sys.argv[2], wrong=sys.argv[3:] == ["wrong"])
