"""Plain PyTorch models, trained by a real job: exactly the records that their configuration gives, right in value."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.integration.frameworks.plain_job import CASES, MICRO_BATCHES, STEPS, rows_of
from tests.kit import forking
from tests.kit.algebra import (
    Attention,
    Call,
    Captures,
    Mismatch,
    check_attention,
    check_linear,
    controls,
    error_of,
)
from tests.kit.expected import ATTENTION, LINEAR, Expected
from tests.kit.models.plain_models import (
    BATCH,
    CHUNKS,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    LAYERS,
    QUANTISED,
    SEQUENCE,
    VOCABULARY,
    WIDTH,
)
from tests.kit.paths import REPOSITORY

pytestmark = pytest.mark.timeout(300)  # the job imports transformers, PEFT and bitsandbytes

ROWS = (BATCH, SEQUENCE)
CALLS = STEPS * MICRO_BATCHES
LATE = SEQUENCE - 2
ALL = (*LINEAR, "grad_input", "grad_weight")
NO_DX = (*LINEAR, "grad_weight")  # its input needs no gradient
FROZEN = (*LINEAR, "grad_input")
FORWARD = LINEAR[:-1]
ALL_ATTENTION = (*ATTENTION, "grad_query", "grad_key", "grad_value")


class Job(NamedTuple):
    """What the job left, with capture and without."""

    captures: Captures
    biases: dict[tuple[str, int, str], Tensor]
    losses: dict[str, list[float]]
    losses_off: dict[str, list[float]]

    def bias(self, call: Call) -> Tensor | None:
        """What a product added."""
        case, _, module = call.module.partition(".")
        for part, columns in _PARTS.items():
            if module.endswith(f".{part}"):
                packed = self.biases.get((case, call.iteration, f"{module.removesuffix(part)}in_proj_bias"))
                return None if packed is None else packed[columns]
        named = self.biases.get((case, call.iteration, f"{module}.bias"))
        lora = self.biases.get((case, call.iteration, f"base_model.model.{module}.bias"))
        return lora if named is None else named


_PARTS = {  # of the bias of nn.MultiheadAttention
    "in_proj": slice(None), "in_proj_q": slice(WIDTH), "in_proj_kv": slice(WIDTH, None), "q_proj": slice(WIDTH),
    **dict.fromkeys(("in_proj_k", "k_proj"), slice(WIDTH, 2 * WIDTH)),
    **dict.fromkeys(("in_proj_v", "v_proj"), slice(2 * WIDTH, None)),
}  # fmt: skip


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="capd-plain-") as name:
        directory = Path(name)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CAPD_")}
        environment |= {"PYTHONPATH": str(REPOSITORY), "CAPD_POLICY": "block", "CAPD_STRICT": "1"}
        script = [sys.executable, "-m", "tests.integration.frameworks.plain_job"]
        run = [sys.executable, "-m", "capd", "run", "--store", name, "--run-id", "job", "--"]
        commands = ([*run, *script, "--biases", str(directory / "biases.pt")], script)
        jobs = [
            forking.popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                imports=imports,
                inner=forking.TRAINING,
            )
            for command, imports in zip(commands, (forking.CAPD, forking.TRAINING), strict=True)
        ]
        try:
            told = [job.communicate(timeout=280) for job in jobs]
        finally:
            for job in jobs:
                job.kill()
        assert [job.returncode for job in jobs] == [0, 0], told
        assert "dropped 0" in told[0][1]
        losses, losses_off = (json.loads(output) for output, _ in told)
        biases = torch.load(directory / "biases.pt", weights_only=True)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in the job: the order of additions is the same
        yield Job(Captures.of_store(directory / "job.zarr"), biases, losses, losses_off)
        torch.set_num_threads(threads)


def expected(case: str) -> Expected:
    first = STEPS * list(CASES).index(case)
    return Expected(steps=range(first, first + STEPS), micro_batches=MICRO_BATCHES)


def heads_of(queries: int, keys: int, heads: int = HEADS) -> dict[str, tuple[int, ...]]:
    """Shapes of an attention of so many positions, and of so many heads of k and v."""
    q, k = (BATCH, HEADS, queries, HEAD_SIZE), (BATCH, heads, keys, HEAD_SIZE)
    return {"query": q, "key": k, "value": k, "output": q}


CAUSAL = partial(F.scaled_dot_product_attention, is_causal=True)


def test_a_decoder_with_a_tied_head_called_in_chunks(job: Job) -> None:
    wanted = expected("decoder")
    for i in range(LAYERS):
        at, layer = (i, "decoder"), f"decoder.layers.{i}"
        for name in ("q", "k", "v", "out"):
            wanted.linear(f"{layer}.attention.{name}", ROWS, WIDTH, WIDTH, at=at, tensors=ALL)
        wanted.linear(f"{layer}.up", ROWS, WIDTH, HIDDEN, at=at, tensors=ALL)
        wanted.linear(f"{layer}.down", ROWS, HIDDEN, WIDTH, at=at, tensors=ALL)
        wanted.attention(f"{layer}.attention", heads_of(SEQUENCE, SEQUENCE), at=at, tensors=ALL_ATTENTION)
    chunk = (BATCH, SEQUENCE // CHUNKS)
    wanted.linear("decoder.head", chunk, WIDTH, VOCABULARY, calls=CHUNKS, tensors=ALL)
    captures = job.captures.of("decoder")

    wanted.check(captures)
    linears = check_linear(captures, bias=job.bias, tied=["decoder.head"])
    attentions = check_attention(captures, compute=CAUSAL, tolerance=0.0)

    every = CALLS * (6 * LAYERS + CHUNKS)
    assert linears == {"Y": every, "dX": every, "dW": CALLS * 6 * LAYERS}
    assert attentions == dict.fromkeys(("O", "dQ", "dK", "dV"), CALLS * LAYERS)


@pytest.mark.parametrize("tensor", ["input", "grad_output"])
def test_what_another_moment_or_a_later_write_left_is_found_out(job: Job, tensor: str) -> None:
    for wrong in controls(job.captures.of("decoder.layers.0.up"), tensor):
        with pytest.raises(Mismatch) as found:
            check_linear(wrong, bias=job.bias)
        assert found.value.error > 0.1


@pytest.mark.parametrize("tensor", ["query", "key", "value"])
def test_the_same_of_attention(job: Job, tensor: str) -> None:
    for wrong in controls(job.captures.of("decoder.layers.0.attention"), tensor):
        with pytest.raises(Mismatch) as found:
            check_attention(wrong, compute=CAUSAL)
        assert found.value.error > 0.1


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


MASK = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril(1)
LINE = torch.linspace(-1, 1, SEQUENCE * SEQUENCE).view(SEQUENCE, SEQUENCE)
WAYS: dict[str, tuple[Attention | None, dict[str, tuple[int, ...]]]] = {
    "early": (partial(F.scaled_dot_product_attention, scale=0.3), heads_of(SEQUENCE, SEQUENCE)),
    "masked": (partial(F.scaled_dot_product_attention, attn_mask=MASK), heads_of(SEQUENCE, SEQUENCE)),
    "biased": (partial(F.scaled_dot_product_attention, attn_mask=LINE), heads_of(SEQUENCE, SEQUENCE)),
    "dropped": (None, heads_of(SEQUENCE, SEQUENCE)),  # O depends on random numbers
    "grouped": (_repeated, heads_of(SEQUENCE, SEQUENCE, 2)),
    "crossing": (F.scaled_dot_product_attention, heads_of(SEQUENCE, LATE)),
    "twice": (F.scaled_dot_product_attention, heads_of(SEQUENCE, SEQUENCE)),
}


def test_every_way_to_call_attention(job: Job) -> None:
    wanted = expected("variants")
    wanted.linear("variants.projection", ROWS, WIDTH, 3 * WIDTH, tensors=NO_DX)
    for name, (_, shapes) in WAYS.items():
        gradients = [t for t in ALL_ATTENTION if t.startswith("grad_")]
        wanted.attention(f"variants.{name}", shapes, tensors=gradients)
        calls = 2 if name == "twice" else 1  # the second one without gradients
        wanted.attention(f"variants.{name}", shapes, calls=calls, tensors=ATTENTION[:-1])
    captures = job.captures.of("variants")

    wanted.check(captures)
    for name, (compute, _) in WAYS.items():
        if compute is not None:
            done = check_attention(captures.of(f"variants.{name}"), compute=compute, tolerance=1e-6)
            assert done["O"] == CALLS * (2 if name == "twice" else 1)
            assert done["dQ"] == done["dK"] == done["dV"] == CALLS


def test_experts_with_as_many_rows_as_fall_to_them_and_with_none(job: Job) -> None:
    wanted = expected("experts")
    wanted.linear("experts.inlet", (BATCH * SEQUENCE,), WIDTH, WIDTH, tensors=NO_DX)
    for number in range(3):
        at = (number, "experts")
        wanted.linear(f"experts.experts.{number}", None, WIDTH, WIDTH, at=at, tensors=ALL)
    captures = job.captures.of("experts")

    wanted.check(captures)
    assert check_linear(captures) == {"Y": 4 * CALLS, "dX": 3 * CALLS, "dW": 4 * CALLS}
    for call, tensors in captures.of("experts.experts").calls("linear").items():
        rows = rows_of(call.micro_batch)[int(call.module[-1])]
        assert {t.shape[0] for name, t in tensors.items() if name != "backward grad_weight"} == {rows}


def test_every_way_of_multihead_attention(job: Job) -> None:
    wanted = expected("attentions")
    late = (LATE, BATCH)
    whole = (SEQUENCE, BATCH)
    for name in ("packed", "weighing", "longer"):
        wanted.linear(f"attentions.{name}.in_proj", whole, WIDTH, 3 * WIDTH, tensors=NO_DX)
    for name in ("memory", "apart"):
        wanted.linear(f"attentions.{name}.in_proj_q", whole, WIDTH, WIDTH, tensors=NO_DX)
    wanted.linear("attentions.memory.in_proj_kv", late, WIDTH, 2 * WIDTH, tensors=NO_DX)
    wanted.linear("attentions.apart.in_proj_k", late, WIDTH, WIDTH, tensors=NO_DX)
    wanted.linear("attentions.apart.in_proj_v", late, WIDTH, WIDTH, tensors=NO_DX)
    wanted.linear("attentions.to_hidden", ROWS, WIDTH, HIDDEN, tensors=NO_DX)
    wanted.linear("attentions.sizes.q_proj", whole, WIDTH, WIDTH, tensors=NO_DX)
    wanted.linear("attentions.sizes.k_proj", whole, HIDDEN, WIDTH, tensors=ALL)
    wanted.linear("attentions.sizes.v_proj", whole, HEAD_SIZE, WIDTH, tensors=NO_DX)
    keys = {"memory": LATE, "apart": LATE, "longer": SEQUENCE + 2}  # a learned key and one of zeros
    for name in ("packed", "memory", "apart", "sizes", "weighing", "longer"):
        wanted.linear(f"attentions.{name}.out_proj", (BATCH * SEQUENCE,), WIDTH, WIDTH, tensors=ALL)
        shapes = heads_of(SEQUENCE, keys.get(name, SEQUENCE))
        wanted.attention(f"attentions.{name}", shapes, tensors=ALL_ATTENTION)
    captures = job.captures.of("attentions")

    wanted.check(captures)
    linears = check_linear(captures, bias=job.bias)
    assert linears == {"Y": 18 * CALLS, "dX": 7 * CALLS, "dW": 18 * CALLS}
    for name in ("memory", "apart", "sizes", "longer"):
        done = check_attention(captures.of(f"attentions.{name}"))
        assert done == dict.fromkeys(("O", "dQ", "dK", "dV"), CALLS)
    assert check_attention(captures.of("attentions.packed"), compute=CAUSAL)["dK"] == CALLS


def test_attention_whose_weights_are_asked_for_is_two_products(job: Job) -> None:
    calls = job.captures.of("attentions.weighing").calls("attention")

    assert len(calls) == CALLS
    for call, tensors in calls.items():
        projected = job.captures.one("attentions.weighing.in_proj", "output", call[3:])
        q, k, v = (split(t) for t in projected.transpose(0, 1).chunk(3, -1))
        assert error_of(tensors["query"], q * HEAD_SIZE**-0.5) < 1e-6
        assert torch.equal(tensors["key"], k)
        assert torch.equal(tensors["value"], v)
        joined = job.captures.one("attentions.weighing.out_proj", "input", call[3:])
        assert torch.equal(tensors["output"].permute(2, 0, 1, 3).flatten(2).flatten(0, 1), joined)
        for name, place in (("key", 1), ("value", 2)):
            whole = job.captures.one("attentions.weighing.in_proj", "grad_output", call[3:])
            part = split(whole.transpose(0, 1).chunk(3, -1)[place])
            assert torch.equal(tensors[f"backward grad_{name}"], part)


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def test_the_transformer_layers_of_torch(job: Job) -> None:
    wanted = expected("translator")
    blocks = {f"encoder.layers.{i}": (i, "translator.encoder") for i in range(LAYERS)} | {
        "decoder": (None, "")
    }
    for name, at in blocks.items():
        block, first = f"translator.{name}", name == "decoder"
        wanted.linear(f"{block}.linear1", ROWS, WIDTH, HIDDEN, at=at, tensors=ALL)
        wanted.linear(f"{block}.linear2", ROWS, HIDDEN, WIDTH, at=at, tensors=ALL)
        crossing = ["multihead_attn"] if first else []
        for each in ("self_attn", *crossing):
            attend = f"{block}.{each}"
            wanted.attention(attend, heads_of(SEQUENCE, SEQUENCE), at=at, tensors=ALL_ATTENTION)
            wanted.linear(f"{attend}.out_proj", (BATCH * SEQUENCE,), WIDTH, WIDTH, at=at, tensors=ALL)
        whole = (SEQUENCE, BATCH)
        kept = NO_DX if first else ALL  # the decoder's input is the job's
        wanted.linear(f"{block}.self_attn.in_proj", whole, WIDTH, 3 * WIDTH, at=at, tensors=kept)
        for part, width in (("q", WIDTH), ("kv", 2 * WIDTH)) if first else ():
            wanted.linear(f"{block}.multihead_attn.in_proj_{part}", whole, WIDTH, width, at=at, tensors=ALL)
    captures = job.captures.of("translator")

    wanted.check(captures)
    every = CALLS * (4 * LAYERS + 7)
    assert check_linear(captures, bias=job.bias) == {"Y": every, "dX": every - CALLS, "dW": every}


def test_linears_with_a_forward_or_a_weight_of_their_own(job: Job) -> None:
    wanted = expected("odd")
    wanted.linear("odd.own", ROWS, WIDTH, WIDTH, tensors=NO_DX, computed=True)
    wanted.linear("odd.normed", ROWS, WIDTH, HIDDEN, tensors=ALL, computed=True)
    wanted.linear("odd.spectral", ROWS, HIDDEN, WIDTH, tensors=ALL, computed=True)
    wanted.linear("odd.low.base", ROWS, WIDTH, WIDTH, tensors=FROZEN)
    wanted.linear("odd.low.a", ROWS, WIDTH, 2, tensors=ALL)
    wanted.linear("odd.low.b", ROWS, 2, WIDTH, tensors=ALL)
    captures = job.captures.of("odd")

    wanted.check(captures)
    assert check_linear(captures, bias=job.bias) == {"Y": 6 * CALLS, "dX": 5 * CALLS, "dW": 5 * CALLS}


def test_conv1d_of_gpt2(job: Job) -> None:
    wanted = expected("gpt2")
    for i in range(LAYERS):
        at, layer = (i, "gpt2.transformer"), f"gpt2.transformer.h.{i}"
        for name, inputs, outputs in (
            ("attn.c_attn", WIDTH, 3 * WIDTH),
            ("attn.c_proj", WIDTH, WIDTH),
            ("mlp.c_fc", WIDTH, 4 * WIDTH),
            ("mlp.c_proj", 4 * WIDTH, WIDTH),
        ):
            wanted.linear(f"{layer}.{name}", ROWS, inputs, outputs, transposed=True, at=at, tensors=ALL)
    wanted.linear("gpt2.lm_head", ROWS, WIDTH, VOCABULARY, tensors=ALL)
    captures = job.captures.of("gpt2").without(lambda record: record.call.layer_type != "linear")

    wanted.check(captures)
    done = check_linear(captures, bias=job.bias, transposed=lambda name: ".c_" in name, tied=["gpt2.lm_head"])

    assert done == {"Y": CALLS * 9, "dX": CALLS * 9, "dW": CALLS * 8}
    layouts = {e.attributes.get("weight_layout") for e in captures.entries if ".c_" in e.key.module}
    assert layouts == {"in_out"}


def test_adapters_of_peft_on_frozen_linears(job: Job) -> None:
    wanted = expected("adapted")
    for i in range(LAYERS):
        at, layer = (i, "adapted"), f"adapted.layers.{i}"
        inner = i > 0  # the embedding in front of the first layer is frozen
        for name in ("q", "v"):
            tensors = FROZEN if inner else FORWARD
            wanted.linear(f"{layer}.attention.{name}.base_layer", ROWS, WIDTH, WIDTH, at=at, tensors=tensors)
            tensors = ALL if inner else NO_DX
            wanted.linear(f"{layer}.attention.{name}.lora_A.default", ROWS, WIDTH, 2, at=at, tensors=tensors)
            wanted.linear(f"{layer}.attention.{name}.lora_B.default", ROWS, 2, WIDTH, at=at, tensors=ALL)
        tensors = FROZEN if inner else FORWARD
        wanted.linear(f"{layer}.attention.k", ROWS, WIDTH, WIDTH, at=at, tensors=tensors)
        wanted.linear(f"{layer}.attention.out", ROWS, WIDTH, WIDTH, at=at, tensors=FROZEN)
        wanted.linear(f"{layer}.up", ROWS, WIDTH, HIDDEN, at=at, tensors=FROZEN)
        wanted.linear(f"{layer}.down", ROWS, HIDDEN, WIDTH, at=at, tensors=FROZEN)
        gradients = [name for name in ALL_ATTENTION if inner or name != "grad_key"]
        wanted.attention(f"{layer}.attention", heads_of(SEQUENCE, SEQUENCE), at=at, tensors=gradients)
    chunk = (BATCH, SEQUENCE // CHUNKS)
    wanted.linear("adapted.head", chunk, WIDTH, VOCABULARY, calls=CHUNKS, tensors=FROZEN)
    captures = job.captures.of("adapted")

    wanted.check(captures)
    done = check_linear(captures, bias=job.bias, tolerance=1e-6)  # frozen weights take other kernels

    assert done["Y"] == CALLS * (10 * LAYERS + CHUNKS)
    assert done["dW"] == CALLS * 4 * LAYERS


def test_quantised_linears_with_what_their_bytes_mean(job: Job) -> None:
    wanted = expected("quantised")
    wanted.linear("quantised.inlet", ROWS, WIDTH, QUANTISED, tensors=NO_DX)
    used = ("input", "output", "grad_output", "grad_input")
    wanted.linear("quantised.four", ROWS, QUANTISED, QUANTISED, tensors=used)
    wanted.linear("quantised.eight", ROWS, QUANTISED, WIDTH, tensors=used)
    blocks = QUANTISED * QUANTISED // 64
    wanted.parameters(
        "quantised.four",
        weight=(QUANTISED * QUANTISED // 2, 1), weight__absmax=(blocks,), weight__quant_map=(16,),
        weight__nested_absmax=(1,), weight__nested_quant_map=(256,), weight__nested_offset=(),
    )  # fmt: skip
    wanted.parameters("quantised.eight", weight=(WIDTH, QUANTISED), weight__SCB=(WIDTH,))
    captures = job.captures.of("quantised")

    wanted.check(captures)
    for call, tensors in captures.calls("linear").items():
        if call.module == "quantised.inlet":
            continue
        four = call.module == "quantised.four"
        weight = (four_bits if four else eight_bits)(captures, call)
        bias = job.bias(call)
        allowed = 1e-5 if four else 0.05  # the 8-bit product rounds its input, too
        assert error_of(tensors["output"], F.linear(tensors["input"], weight, bias)) < allowed
        assert error_of(tensors["backward grad_input"], tensors["backward grad_output"] @ weight) < 1e-5


def four_bits(captures: Captures, call: Call) -> Tensor:
    """The weight that the captured bytes and state stand for, by the definition of NF4 alone."""
    at = (call.iteration, 0, 0)
    [about] = {
        json.dumps(e.attributes) for e in captures.of(call.module).entries if e.record.tensor_name == "weight"
    }
    known = json.loads(about)
    assert known["quant_type"] == "nf4"
    payload = captures.one(call.module, "weight", at).flatten().long()
    nibbles = torch.stack([payload >> 4, payload & 15], 1).flatten()
    nested = captures.one(call.module, "weight.nested_quant_map", at)
    scale = nested[captures.one(call.module, "weight.absmax", at).long()].view(1, -1)
    scale = scale * captures.one(call.module, "weight.nested_absmax", at)[:, None]
    scale = scale.flatten() + captures.one(call.module, "weight.nested_offset", at)
    values = captures.one(call.module, "weight.quant_map", at)[nibbles].view(-1, known["blocksize"])
    return (values * scale[:, None]).view(known["shape"])


def eight_bits(captures: Captures, call: Call) -> Tensor:
    """The same of rows of whole numbers, each with its scale."""
    at = (call.iteration, 0, 0)
    return (
        captures.one(call.module, "weight", at) * captures.one(call.module, "weight.SCB", at)[:, None] / 127
    )


def test_losses_are_the_same_with_capture_off(job: Job) -> None:
    assert job.losses.keys() == CASES.keys()
    assert job.losses == job.losses_off
