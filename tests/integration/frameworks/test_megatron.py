"""Megatron-LM, trained by its own schedules: exactly the records that the configuration gives, right in value.

CAPD_TEST_MEGATRON names directories with other versions of megatron-core (pip install --target), separated by colons:
the slow tier runs all modes on each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import capd
from tests.integration.frameworks.megatron_job import (
    EXPERTS,
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    MICRO_BATCH_SIZE,
    MICRO_BATCHES,
    MODES,
    SEQUENCE,
    STEPS,
    TENSORS,
    VOCABULARY,
    Mode,
)
from tests.kit import forking
from tests.kit.algebra import (
    Captures,
    Mismatch,
    Record,
    attention,
    check_attention,
    check_linear,
    controls,
)
from tests.kit.expected import Expected
from tests.kit.models.megatron_context import order
from tests.kit.paths import REPOSITORY

pytestmark = pytest.mark.timeout(600)  # the first test waits for the whole job
RANKS = 2
SIZE = HIDDEN // HEADS
GROUPED = "grouped"  # up to 0.16
QUICK = ("tp2sp", "vpp", "moefull", GROUPED)
SLOW = tuple(name for name in MODES if name not in QUICK)
VERSIONS = tuple(filter(None, os.environ.get("CAPD_TEST_MEGATRON", "").split(":")))
LINEAR = tuple(name for name in TENSORS if "input" in name or "weight" in name or "output" in name)
ATTENTION = (*(name for name in TENSORS if name not in LINEAR), "output", "grad_output")


class Job(NamedTuple):
    """What one job left, that ran some modes one after the other."""

    modes: tuple[str, ...]
    store: Path
    captures: Captures
    losses: list[dict[str, dict[str, list[str]]]]  # of each rank
    log: str

    def of(self, mode: str) -> Captures:
        return self.captures.without(lambda record: not record.call.module.startswith(f"{mode}."))


def run(directory: Path, modes: tuple[str, ...], version: str = "", **settings: str) -> Job:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CAPD_")}
    path = os.pathsep.join(filter(None, [version, str(REPOSITORY), environment.get("PYTHONPATH")]))
    environment |= {
        "PYTHONPATH": path,
        "CAPD_POLICY": "block",
        "CAPD_STRICT": "1",
        "OMP_NUM_THREADS": "1",
        **settings,
    }
    done = forking.run(
        [sys.executable, "-m", "capd", "run", "--store", str(directory), "--run-id", "job", "--",
         sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
         "-m", "tests.integration.frameworks.megatron_job", str(directory), *modes],
        env=environment, capture_output=True, text=True, timeout=500, inner=forking.TRAINING,
    )  # fmt: skip
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    losses = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    return Job(modes, directory / "job.zarr", Captures.of_store(directory / "job.zarr"), losses, log)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As in the job: the order of additions is the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="capd-megatron-") as directory:
        yield run(Path(directory), QUICK)


def steps(job: Job, name: str) -> range:
    """The iterations of a mode: one process runs them all, and what resumes goes on from there."""
    first = 0
    for mode in job.modes[: job.modes.index(name)]:
        first = (first if MODES[mode].resumed is None else MODES[mode].resumed) + STEPS
    first = first if MODES[name].resumed is None else MODES[name].resumed
    return range(first, first + STEPS)


def expected(job: Job, name: str) -> Expected:
    """All records of a mode, with their shapes."""
    mode = MODES[name]
    wanted = Expected(steps=steps(job, name), micro_batches=MICRO_BATCHES + mode.own)
    for rank in range(RANKS):
        stage = rank if mode.pp > 1 else 0
        for layer in (layer for chunk in range(mode.vpp) for layer in mode.layers(stage, chunk)):
            _add_layer(wanted, f"{name}.decoder", layer, mode, rank)
        if stage == mode.pp - 1:
            column(wanted, f"{name}.output_layer", VOCABULARY, mode, rank, (None, ""))
    return wanted


def _add_layer(wanted: Expected, stack: str, layer: int, mode: Mode, rank: int) -> None:
    at, prefix = (layer, stack), f"{stack}.layers.{layer}"
    column(wanted, f"{prefix}.self_attention.linear_qkv", (HEADS + 2 * GROUPS) * SIZE, mode, rank, at)
    rows = (SEQUENCE // mode.cp, MICRO_BATCH_SIZE)
    keys = (*rows, GROUPS // mode.tp, SIZE)
    shapes = {
        "query": (*rows, HEADS // mode.tp, SIZE), "key": keys, "value": keys, "output": (*rows, HIDDEN // mode.tp),
    }  # fmt: skip
    wanted.attention(
        f"{prefix}.self_attention.core_attention", shapes, tensors=ATTENTION, at=at, ranks=[rank]
    )
    own: dict[str, Any] = {"tensors": LINEAR, "at": at, "ranks": [rank]}
    wanted.linear(f"{prefix}.self_attention.linear_proj", rows, HIDDEN // mode.tp, HIDDEN, **own)
    if not mode.experts:
        column(wanted, f"{prefix}.mlp.linear_fc1", FFN, mode, rank, at)
        wanted.linear(f"{prefix}.mlp.linear_fc2", rows, FFN // mode.tp, HIDDEN, **own)
        return
    wanted.linear(f"{prefix}.mlp.router", rows, HIDDEN, EXPERTS, **own)
    for expert in range(0 if mode.grouped else EXPERTS // mode.ep):
        wanted.linear(f"{prefix}.mlp.experts.local_experts.{expert}.linear_fc1", None, HIDDEN, FFN, **own)
        wanted.linear(f"{prefix}.mlp.experts.local_experts.{expert}.linear_fc2", None, FFN, HIDDEN, **own)


def column(
    wanted: Expected, module: str, outputs: int, mode: Mode, rank: int, at: tuple[int | None, str]
) -> None:
    """A linear whose rows are split; its input is a part of the sequence under sequence parallelism."""
    rows = (SEQUENCE // mode.cp, MICRO_BATCH_SIZE)
    wanted.linear(module, rows, HIDDEN, outputs // mode.tp, tensors=LINEAR, at=at, ranks=[rank])
    if mode.sp:
        part = (SEQUENCE // mode.tp, MICRO_BATCH_SIZE, HIDDEN)
        wanted.shapes |= {(module, "linear", name): part for name in ("input", "grad_input")}


def is_column(module: str) -> bool:
    return module.endswith(("linear_qkv", "linear_fc1", "output_layer"))


def gathered(captures: Captures, mode: Mode) -> Captures:
    """What the products of one rank had: inputs whole, and no dX that is a sum over ranks (`check_summed`)."""
    if mode.tp == mode.cp == 1:
        return captures
    at = {entry.record: entry.tensor for entry in captures.entries}
    entries = []
    for entry in captures.entries:
        call, _, name = entry.record
        if mode.cp > 1:
            if call.layer_type == "attention":
                entry = entry._replace(tensor=whole_sequence(entry.record, at))
            entries.append(entry)
            continue
        if is_column(call.module) and name == "grad_input":
            continue
        if is_column(call.module) and name == "input" and mode.sp:
            parts = [at[entry.record._replace(call=call._replace(rank=rank))] for rank in range(RANKS)]
            entry = entry._replace(tensor=torch.cat(parts))
        entries.append(entry)
    return Captures(entries)


def whole_sequence(record: Record, at: dict[Record, Tensor]) -> Tensor:
    """What all ranks together had, in the order of the sequence."""
    parts = [at[record._replace(call=record.call._replace(rank=rank))] for rank in range(RANKS)]
    return torch.cat(parts)[order(SEQUENCE, RANKS).argsort()]


def check_summed(captures: Captures, mode: Mode) -> int:
    """dX of the split linears is the sum over the ranks, or its part of the sequence; returns how many there are."""
    weights = {(c.rank, c.module, c.iteration): weight for c, weight in captures.weights().items()}
    checked = 0
    products = captures.calls("linear")
    for call in (call for call in products if call.rank == 0 and is_column(call.module)):
        parts, found = [], []
        for rank in range(RANKS):
            of_rank = products[call._replace(rank=rank)]
            parts.append(of_rank["backward grad_output"].matmul(weights[rank, call.module, call.iteration]))
            found.append(of_rank["backward grad_input"])
        truth = parts[0] + parts[1]
        expected = truth.chunk(RANKS) if mode.sp else (truth, truth)
        assert all(map(torch.equal, found, expected)), call
        checked += RANKS
    return checked


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, causal=True)


def heads_of(captures: Captures) -> Counter[str]:
    return check_attention(captures, compute=causal, layout="sbhd", output_layout="sb(hd)", tolerance=1e-5)


def check_mode(job: Job, name: str) -> None:
    mode, captures, wanted = MODES[name], job.of(name), expected(job, name)
    wanted.check(captures)
    whole = gathered(captures, mode)
    linear = check_linear(whole)
    summed = check_summed(captures, mode) if mode.tp > 1 else 0
    count = Counter((record.call.layer_type, record.tensor_name) for record in wanted.records)
    assert linear["dX"] + summed == linear["dW"] == linear["Y"] == count["linear", "output"]
    heads = heads_of(whole)
    assert heads == dict.fromkeys(("O", "dQ", "dK", "dV"), count["attention", "query"])
    check_places(captures, mode)
    if mode.ep > 1:
        check_experts(captures)
    for losses in job.losses:
        assert losses[name]["on"] == losses[name]["off"]


def check_places(captures: Captures, mode: Mode) -> None:
    """Every record says where its rank stood."""
    rest = RANKS // (mode.tp * mode.pp * mode.cp)
    sizes = {"tp": mode.tp, "pp": mode.pp, "cp": mode.cp, "ep": mode.ep, "dp": rest}
    for (call, *_), _, _, attributes in captures.entries:
        for group, size in sizes.items():
            place = (attributes[f"{group}_rank"], attributes[f"{group}_size"])
            assert place == ((call.rank, RANKS) if size > 1 else (0, 1)), (call, group)


def check_experts(captures: Captures) -> None:
    """Expert e, as its attribute counts over all ranks, got the tokens of all ranks whose largest logit is the e-th."""
    at = {entry.record: entry.tensor for entry in captures.entries}
    for (call, _, name), _, rows, attributes in captures.entries:
        layer, _, module = call.module.partition(".experts.")
        if name != "input" or not module.endswith("linear_fc1"):
            continue
        routed = []
        for rank in range(RANKS):
            router = call._replace(rank=rank, module=f"{layer}.router")
            tokens, logits = (
                at[Record(router, "forward", what)].flatten(0, 1) for what in ("input", "output")
            )
            routed.append(tokens[logits.argmax(-1) == attributes["expert"]])
        assert torch.equal(rows, torch.cat(routed)), call


@pytest.mark.parametrize("mode", QUICK)
def test_every_mode_has_its_records_and_their_values_fit(job: Job, mode: str) -> None:
    check_mode(job, mode)


def test_losses_and_norms_come_by_themselves_and_those_of_evaluations_do_not(job: Job) -> None:
    store = capd.open(job.store)
    for rank, losses in enumerate(job.losses):
        # A step trains its micro-batches, then evaluates on as many. Only the last stage has losses.
        trained = [
            (steps(job, name)[0] + step, float.fromhex(loss))
            for name in job.modes
            for step in range(STEPS)
            for loss in losses[name]["on"][2 * step * MICRO_BATCHES :][:MICRO_BATCHES]
        ]
        assert trained
        found = store.scalar("loss", rank=rank)
        assert list(zip(found.iterations.tolist(), found.values.tolist(), strict=True)) == trained
        assert set(found.micro_batches.tolist()) == set(range(MICRO_BATCHES))
        norms = store.scalar("grad_norm", rank=rank)
        everything = {step for name in job.modes for step in steps(job, name)}
        skipped = {steps(job, name)[0] + step for name in job.modes for step in MODES[name].skipped}
        assert set(norms.iterations.tolist()) == everything - skipped
        assert (norms.values > 0).all()
    assert list(store.scalars()) == ["grad_norm", "loss"]


@pytest.mark.parametrize("tensor_name", ["input", "grad_output", "key"])
def test_a_swapped_micro_batch_or_a_later_write_is_found_out(job: Job, tensor_name: str) -> None:
    check = heads_of if tensor_name == "key" else check_linear
    for wrong in controls(gathered(job.of("tp2sp"), MODES["tp2sp"]), tensor_name):
        with pytest.raises(Mismatch) as found:
            check(wrong)
        assert found.value.error > 0.1


def test_experts_without_a_token_have_records_of_zero_rows(job: Job) -> None:
    """The job's last expert: its router's row is the mean of two others, so that one of these has the larger logit."""
    inputs = [entry for entry in job.of("moefull").entries if entry.record.tensor_name == "input"]
    rows = [
        (entry.record.call, len(entry.tensor)) for entry in inputs if ".experts." in entry.record.call.module
    ]
    starved = [
        count for call, count in rows if f".{EXPERTS - 1}.linear_fc" in call.module
        and call.iteration == steps(job, "moefull")[0]
    ]  # fmt: skip

    assert starved == [0] * (2 * LAYERS * MICRO_BATCHES)
    assert sum(count for _, count in rows) == 2 * LAYERS * STEPS * MICRO_BATCHES * SEQUENCE * MICRO_BATCH_SIZE


def one(job: Job, module: str, tensor_name: str, rank: int, operation: str = "forward") -> Any:
    [series] = capd.open(job.store).find(
        module=module, tensor_name=tensor_name, rank=rank, operation=operation
    )
    return series


def test_experts_that_one_kernel_multiplies_are_named(job: Job) -> None:
    named = [f"decoder.layers.{layer}.mlp.experts (GroupedMLP)" for layer in range(LAYERS)]
    assert f"multiply in ways of their own: {', '.join(named)}" in job.log


def test_series_say_where_the_rank_stood_and_which_part_it_had(job: Job) -> None:
    layer = "tp2sp.decoder.layers.1"
    placements = {
        ("self_attention.linear_qkv", "input"): "S(0)",
        ("self_attention.linear_qkv", "weight"): "S(0)",
        ("self_attention.linear_qkv", "output"): "S(-1)",
        ("self_attention.core_attention", "query"): "S(-2)",
        ("self_attention.linear_proj", "input"): "S(-1)",
        ("self_attention.linear_proj", "weight"): "S(1)",
        ("self_attention.linear_proj", "output"): "P(sum)",
    }
    for (module, tensor_name), placement in placements.items():
        attributes = one(job, f"{layer}.{module}", tensor_name, rank=1).records[0].attributes
        assert attributes["tp_placement"] == placement
        assert {k: v for k, v in attributes.items() if k.endswith(("_rank", "_size"))} == {
            "tp_rank": 1, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "dp_rank": 0, "dp_size": 1,
            "cp_rank": 0, "cp_size": 1, "ep_rank": 0, "ep_size": 1,
        }  # fmt: skip
    assert (
        one(job, f"{layer}.self_attention.core_attention", "key", rank=0).records[0].attributes["layout"]
        == "sbhd"
    )
    expert = one(job, "moefull.decoder.layers.3.mlp.experts.local_experts.2.linear_fc1", "weight", rank=1)
    assert expert.records[0].attributes["expert"] == 2
    assert expert.records[0].attributes["pp_rank"] == 1
    assert "tp_placement" not in expert.records[0].attributes


def test_records_carry_what_the_old_saver_kept(job: Job) -> None:
    for operation in ("forward", "backward"):
        name = "output" if operation == "forward" else "grad_output"
        linear = one(job, "tp2sp.decoder.layers.0.mlp.linear_fc1", name, rank=0, operation=operation)
        assert [record.metadata for record in linear.records] == STEPS * MICRO_BATCHES * [
            {"sequence_parallel": True, "use_bias": False, "wgrad_compute": True, "tp_group_size": 2}
        ]
    core = one(job, "vpp.decoder.layers.2.self_attention.core_attention", "value", rank=0)
    attributes = core.records[0].attributes
    assert (attributes["pp_rank"], attributes["vpp_rank"], attributes["vpp_size"]) == (0, 1, 2)
    assert core.records[0].metadata == {
        "attention_mask_shape": [1, 1, SEQUENCE, SEQUENCE],
        "attn_mask_type": "AttnMaskType.causal",
        "softmax_scale": 0.5,
        "attention_dropout": 0.0,
    }


every_version = pytest.mark.parametrize(
    "version", ["", *VERSIONS], ids=["installed", *(Path(v).name for v in VERSIONS)]
)


@pytest.mark.fault
@pytest.mark.timeout(600)
@every_version
def test_the_other_modes_and_all_modes_of_other_versions(version: str, tmp_path: Path) -> None:
    modes = tuple(name for name in MODES if name != GROUPED) if version else SLOW
    job = run(tmp_path, modes, version)

    for mode in modes:
        check_mode(job, mode)


@pytest.mark.fault
@pytest.mark.timeout(300)
@every_version
def test_chunks_that_are_found_in_a_job_that_knows_nothing_of_capd(version: str, tmp_path: Path) -> None:
    job = run(tmp_path, ("unwatched", "vpp"), version, CAPD_STEPS="all")
    names = {entry.record.call.module for entry in job.captures.entries}

    layers = {f"decoder.layers.{layer}.mlp.linear_fc1" for layer in range(LAYERS)}
    assert layers <= names
    assert {name.partition(".")[0] for name in names} == {"decoder", "output_layer"}
    at = sorted(
        (e.record.call.iteration, e.record.call.micro_batch)
        for e in job.captures.entries if e.record.call.module in layers and e.record.tensor_name == "input"
    )  # fmt: skip
    assert at == [(step, mb) for step in range(STEPS) for mb in range(MICRO_BATCHES) for _ in layers]
    assert check_linear(job.captures)["Y"] == STEPS * MICRO_BATCHES * (4 * LAYERS + 1)
