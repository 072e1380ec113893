"""Trains a tiny GPT with megatron-core on text, on CPUs over gloo. The script knows nothing of capd.

    torchrun --nproc-per-node 2 train_gpt.py CHECKPOINTS LOGS TOKENIZER DATA DTYPE [--parallel tensor|data]

The five arguments are those that run_tensor_collection.sh passes to a training script. One token is one byte, so
TOKENIZER is not read. DATA is a file, or a directory whose .md, .txt and .py files are read.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# One token is one byte.
LAYERS, HIDDEN, HEADS, VOCABULARY = 2, 32, 4, 256
SEQUENCE, MICRO_BATCH_SIZE, MICRO_BATCHES = 32, 2, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run_on_cpu() -> None:
    """Replace the CUDA functions that megatron-core calls by functions of the CPU.

    A script for GPUs does not need this. No arithmetic and no schedule is replaced. Buffers are created on the CPU,
    and one generator replaces the GPU's.
    """

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return factory(*args, **kwargs)

        return make

    # Compiling megatron's small fusions takes minutes on a CPU.
    torch._dynamo.config.disable = True
    from megatron.core.tensor_parallel import random

    for name in ("zeros", "empty", "full", "tensor", "zeros_like", "empty_like"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    anything: Any = torch
    anything.Tensor.cuda = lambda self, *_, **__: self
    anything.cuda.current_device = lambda: torch.device("cpu")
    anything.cuda.synchronize = lambda *_: None
    anything.cuda.manual_seed = torch.manual_seed
    anything.cuda.get_rng_state = anything.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def build(tensor_parallel: int, dtype: torch.dtype) -> Any:
    """Return the model, wrapped as Megatron's own training script wraps it."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=4 * HIDDEN,
        tensor_model_parallel_size=tensor_parallel, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True,
        # These kernels need a GPU.
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_activation_fusion=False,
        bias_dropout_fusion=False, apply_rope_fusion=False,
    )  # fmt: skip
    model = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE, share_embeddings_and_output_weights=False, position_embedding_type="rope",
    )  # fmt: skip
    reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config, reduction, model.to(dtype))
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = wrapped.no_sync
    return wrapped


def read_text(data: Path) -> torch.Tensor:
    files = [data] if data.is_file() else sorted(data.rglob("*.*"))
    texts = [file.read_bytes() for file in files if data.is_file() or file.suffix in (".md", ".txt", ".py")]
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)


def draw_batches(text: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """Yield random windows of the text, one token longer than a sequence."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - SEQUENCE, (MICRO_BATCH_SIZE,), generator=generator)
        yield torch.stack([text[s : s + SEQUENCE + 1] for s in starts.tolist()]).long()


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Return the output of one micro-batch, and the function that turns it into a loss.

    Megatron's schedule calls this.
    """
    tokens = next(data)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(SEQUENCE).expand_as(inputs)
    hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return model(inputs, positions, hidden, labels=labels.contiguous()), mean_loss


def mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    # The schedule divides the first value in place.
    return loss, {"loss": loss.detach().clone()}


def train(args: argparse.Namespace) -> None:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    tensor_parallel = dist.get_world_size() if args.parallel == "tensor" else 1
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234)
    model = build(tensor_parallel, DTYPES[args.dtype])
    # Megatron's own optimizer takes bf16 only on GPUs.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # The file of this rank's shard.
    own = args.checkpoints / f"rank{dist.get_rank()}.pt"
    first = 0
    if own.exists():
        saved = torch.load(own, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["iteration"]

    text = read_text(args.data)
    schedule = get_forward_backward_func()
    for iteration in range(first, args.iterations):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = schedule(
            forward_step_func=forward_step,
            data_iterator=draw_batches(text, 1000 * iteration + parallel_state.get_data_parallel_rank()),
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=False,
        )
        # Megatron gathers and reduces gradients in main_grad.
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        optimizer.step()
        # The file is renamed when it is complete, because the job may be ended at any moment.
        unfinished = own.with_suffix(".tmp")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration + 1}
        torch.save(state, unfinished)
        unfinished.replace(own)
        if dist.get_rank() == 0:
            loss = sum(float(one["loss"]) for one in losses) / len(losses)
            print(f"iteration {iteration:3d}  loss {loss:.4f}", flush=True)
            with (args.logs / "loss.jsonl").open("a") as log:
                log.write(json.dumps({"iteration": iteration, "loss": loss}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", type=Path, help="directory; a run goes on with what is there")
    parser.add_argument("logs", type=Path, help="directory for loss.jsonl")
    parser.add_argument("tokenizer", help="not read: tokens are bytes")
    parser.add_argument("data", type=Path)
    parser.add_argument("dtype", choices=DTYPES)
    parser.add_argument("--parallel", choices=("tensor", "data"), default="tensor")
    parser.add_argument("--iterations", type=int, default=20)
    args = parser.parse_args()
    for directory in (args.checkpoints, args.logs):
        directory.mkdir(parents=True, exist_ok=True)

    torch.set_num_threads(1)
    run_on_cpu()
    dist.init_process_group("gloo")
    train(args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
