"""Plain PyTorch models, trained by a real job: exactly the records that their configuration gives, right in value."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.integration.algebra import Call, Captures, Mismatch, check_linear, controls
from tests.integration.expected import Expected
from tests.integration.plain_job import CASES, MICRO_BATCHES, STEPS, TENSORS
from tests.integration.plain_models import BATCH, CHUNKS, HIDDEN, LAYERS, SEQUENCE, VOCABULARY, WIDTH

REPOSITORY = Path(__file__).parents[2]
ROWS = (BATCH, SEQUENCE)


class Job(NamedTuple):
    """What the job left, with capture and without."""

    captures: Captures
    biases: dict[tuple[str, int, str], torch.Tensor]
    losses: dict[str, list[float]]
    losses_off: dict[str, list[float]]

    def of(self, case: str) -> Captures:
        return self.captures.without(lambda record: not record.call.module.startswith(f"{case}."))

    def bias(self, call: Call) -> torch.Tensor | None:
        case, _, module = call.module.partition(".")
        return self.biases.get((case, call.iteration, f"{module}.bias"))


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="capd-plain-") as name:
        directory = Path(name)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CAPD_")}
        environment |= {"PYTHONPATH": str(REPOSITORY), "CAPD_POLICY": "block", "CAPD_STRICT": "1"}
        script = [sys.executable, "-m", "tests.integration.plain_job"]
        run = [sys.executable, "-m", "capd", "run", "--store", name, "--run-id", "job", "--"]
        commands = ([*run, *script, "--biases", str(directory / "biases.pt")], script)
        done = [
            subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
            for command in commands
        ]
        for one in done:
            assert one.returncode == 0, one.stdout + one.stderr
        assert "dropped 0" in done[0].stderr
        losses, losses_off = (json.loads(one.stdout) for one in done)
        biases = torch.load(directory / "biases.pt", weights_only=True)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in the job: the order of additions is the same
        yield Job(Captures.of_store(directory / "job.zarr"), biases, losses, losses_off)
        torch.set_num_threads(threads)


def expected(case: str) -> Expected:
    first = STEPS * list(CASES).index(case)
    return Expected(steps=range(first, first + STEPS), micro_batches=MICRO_BATCHES)


def test_a_decoder_with_a_tied_head_called_in_chunks(job: Job) -> None:
    wanted = expected("decoder")
    for i in range(LAYERS):
        at, layer = (i, "decoder"), f"decoder.layers.{i}"
        for name in ("q", "k", "v", "out"):
            wanted.linear(f"{layer}.attention.{name}", ROWS, WIDTH, WIDTH, at=at, tensors=TENSORS)
        wanted.linear(f"{layer}.up", ROWS, WIDTH, HIDDEN, at=at, tensors=TENSORS)
        wanted.linear(f"{layer}.down", ROWS, HIDDEN, WIDTH, at=at, tensors=TENSORS)
    chunk = (BATCH, SEQUENCE // CHUNKS)
    wanted.linear("decoder.head", chunk, WIDTH, VOCABULARY, calls=CHUNKS, tensors=TENSORS)
    calls = STEPS * MICRO_BATCHES * (6 * LAYERS)

    wanted.check(job.of("decoder"))
    done = check_linear(job.of("decoder"), bias=job.bias, tied=["decoder.head"])

    heads = STEPS * MICRO_BATCHES * CHUNKS
    assert done == {"Y": calls + heads, "dX": calls + heads, "dW": calls}


@pytest.mark.parametrize("tensor", ["input", "grad_output"])
def test_what_another_moment_or_a_later_write_left_is_found_out(job: Job, tensor: str) -> None:
    for wrong in controls(job.of("decoder"), tensor):
        with pytest.raises(Mismatch) as found:
            check_linear(wrong, bias=job.bias)
        assert found.value.error > 0.1


def test_losses_are_the_same_with_capture_off(job: Job) -> None:
    assert job.losses.keys() == CASES.keys()
    assert job.losses == job.losses_off
