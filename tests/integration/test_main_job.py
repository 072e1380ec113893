"""A real training job on two ranks, through `capd run`, compared with what the ranks held.

One job per module: torchrun, DistributedDataParallel over gloo, gradient accumulation, bf16 autocast
(examples/train_text.py). The reference is written by plain hooks and torch.save, the expected records are
counted from the job's options alone.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import xarray
import zarr

import capd as capd_package
from tests.kit import forking
from tests.kit.jobs.products import assert_products_hold
from tests.kit.launching import assert_trained
from tests.kit.paths import REPOSITORY
from tests.kit.processes import capd, command_lines, until

RANKS, STEPS, MICRO_BATCHES, LAYERS, CAPTURED = 2, 3, 2, 2, (0, 1)
OPTIONS = [
    "--steps", str(STEPS), "--layers", str(LAYERS), "--d-model", "64", "--heads", "2", "--seq", "32",
    "--micro-batches", str(MICRO_BATCHES), "--corpus-bytes", "300000", "--capture-steps", "0-1",
]  # fmt: skip
Moment = tuple[int, str, str, int, int]  # rank, module, tensor_name, iteration, micro_batch


@dataclass
class Job:
    """What the two jobs, with capture and without, left."""

    run: Path
    output: str
    reference: dict[Moment, torch.Tensor]
    losses: Any
    losses_off: Any


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="capd-job-") as name:
        directory = Path(name)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CAPD_")} | {
            "OMP_NUM_THREADS": "1"
        }
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
            str(REPOSITORY / "examples" / "train_text.py"), *OPTIONS,
        ]  # fmt: skip
        store = directory / "store"
        captured = forking.run(
            [sys.executable, "-m", "capd", "run", "--store", str(store), "--run-id", "job", "--", *torchrun,
             "--dump-losses", str(directory / "on.json"), "--dump-tensors", str(directory / "reference")],
            env=environment, capture_output=True, text=True, timeout=110, inner=forking.TRAINING,
        )  # fmt: skip
        assert captured.returncode == 0, captured.stdout + captured.stderr
        plain = forking.run(
            [*torchrun, "--dump-losses", str(directory / "off.json")],
            env=environment, capture_output=True, text=True, timeout=110, inner=forking.TRAINING,
        )  # fmt: skip
        assert_trained(plain)
        reference = {
            (rank, *identity): tensor
            for rank in range(RANKS)
            for *identity, tensor in torch.load(directory / "reference" / f"rank{rank}.pt", weights_only=True)
        }
        assert_products_hold(store / "job.zarr")
        yield Job(
            store / "job.zarr",
            captured.stdout + captured.stderr,
            reference,
            json.loads((directory / "on.json").read_text()),
            json.loads((directory / "off.json").read_text()),
        )


def expected_moments() -> set[Moment]:
    """Every record that the job's options ask for; no capd and no hook involved."""
    linears = [f"layers.{i}.{name}" for i in range(LAYERS) for name in
               ("attention.q", "attention.k", "attention.v", "attention.out", "up", "down")] + ["lm_head"]  # fmt: skip
    moments: set[Moment] = set()
    for rank in range(RANKS):
        for step in CAPTURED:
            moments |= {(rank, module, "weight", step, 0) for module in linears}
            for micro_batch in range(MICRO_BATCHES):
                for module in linears:
                    for tensor_name in ("input", "output", "grad_output"):
                        moments.add((rank, module, tensor_name, step, micro_batch))
                for layer in range(LAYERS):
                    for tensor_name in ("query", "key", "value", "output", "grad_output"):
                        moments.add((rank, f"layers.{layer}.attention", tensor_name, step, micro_batch))
    return moments


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_exactly_the_expected_records_are_there(job: Job) -> None:
    found = [
        (s.key.rank, s.key.module, s.key.tensor_name, record.iteration, record.micro_batch)
        for s in capd_package.open(job.run).series
        for record in s.records
    ]

    assert len(found) == len(set(found))
    assert set(found) == expected_moments() == set(job.reference)


def test_keys_say_what_each_tensor_is(job: Job) -> None:
    for series in capd_package.open(job.run).series:
        key = series.key
        inside = key.module.startswith("layers.")
        assert key.layer == (int(key.module.split(".")[1]) if inside else None)
        if key.module.endswith(".attention"):
            assert (key.layer_type, key.component) == ("attention", "FA")
        else:
            assert (key.layer_type, key.component) == ("linear", "linear")
        assert key.operation == ("backward" if key.tensor_name == "grad_output" else "forward")
        assert key.phase == ("post" if key.tensor_name == "output" else "pre")
        assert key.quant_type == {"bfloat16": "bf16", "float32": "fp32"}[series.dtype]


def test_capd_returns_what_the_rank_held_bit_for_bit(job: Job) -> None:
    for series in capd_package.open(job.run).series:
        for i, record in enumerate(series.records):
            moment = (
                series.key.rank,
                series.key.module,
                series.key.tensor_name,
                record.iteration,
                record.micro_batch,
            )
            held = job.reference[moment]
            tensor = series.torch(i)
            assert tensor.dtype == held.dtype, moment
            assert record.shape == tuple(held.shape) == tuple(tensor.shape), moment
            assert bits(tensor) == bits(held), moment
            assert record.stats.count == held.numel()
            assert record.stats.absmax == held.abs().max().item()


def test_zarr_and_tensorstore_read_the_same_without_capd(job: Job) -> None:
    seen = 0
    for group in job.run.glob("*/rank*/layer*/*/*"):
        if not (group / "data" / "zarr.json").exists():
            continue
        attributes = zarr.open_group(group, mode="r").attrs["capd"]
        array = zarr.open_array(group / "data", mode="r")[...]
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(group / "data")}}
        assert np.array_equal(tensorstore.open(spec).result().read().result(), array)
        columns, key = attributes["records"], attributes["key"]
        for number in range(columns["count"]):
            iteration, micro_batch = (
                columns[name][number] if isinstance(columns[name], list) else columns[name]
                for name in ("iteration", "micro_batch")
            )
            held = job.reference[key["rank"], key["module"], key["tensor_name"], iteration, micro_batch]
            assert columns["shape"] == list(held.shape)
            assert array[number].tobytes() == bits(held)
            seen += 1
    assert seen == len(job.reference)


def test_xarray_opens_a_series(job: Job) -> None:
    [series] = capd_package.open(job.run).find(rank=1, module="lm_head", tensor_name="input")

    plain = xarray.open_zarr(job.run / series.path, consolidated=False)["data"]
    ours = series.xarray()

    assert plain.shape == ours.shape == series.shape
    assert list(zip(ours.iteration.values, ours.micro_batch.values, strict=True)) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_losses_are_the_same_with_capture_on_and_off(job: Job) -> None:
    assert len(job.losses) == RANKS
    assert len(job.losses[0]) == STEPS * MICRO_BATCHES
    assert job.losses == job.losses_off


def test_the_command_line_tells_the_same(job: Job) -> None:
    listed = json.loads(capd("ls", str(job.run), "--json").stdout)
    stats = json.loads(capd("stats", str(job.run), "--json").stdout)
    weights = json.loads(capd("ls", str(job.run), "--tensor", "weight", "--rank", "1", "--json").stdout)

    assert sum(series["records"] for series in listed) == len(job.reference)
    assert {s["tensor_name"] for s in weights} == {"weight"}
    assert len(weights) == 6 * LAYERS + 1
    assert stats["offered"] == stats["committed"] == len(job.reference)
    assert (stats["dropped"], stats["in_flight"], stats["clean"]) == ({}, 0, True)
    assert stats["raw_bytes"] == sum(tensor.nbytes for tensor in job.reference.values())


def test_run_leaves_nothing_behind(job: Job) -> None:
    assert not list((job.run / ".capd").glob("*/spool/*"))
    assert "Traceback" not in job.output
    mark = os.fsencode(job.run.parent)
    until(lambda: not [words for words in command_lines().values() if mark in b" ".join(words)])
