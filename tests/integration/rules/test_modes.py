"""Modes that cut the bytes at the source, on a real training loop with a real daemon."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import capd as capd_package
from tests.kit.jobs.modes import ITERATIONS, MICRO_BATCHES, job, same_bits, train
from tests.kit.processes import Daemon, capd

Moment = tuple[str, str, int, int]  # module, tensor_name, iteration, micro_batch


def stored(daemon: Daemon) -> dict[Moment, tuple[torch.Tensor, Any]]:
    """Every record of the run, and what the store says about it."""
    found: dict[Moment, tuple[torch.Tensor, Any]] = {}
    for series in capd_package.open(daemon.store / "run.zarr").series:
        for i, record in enumerate(series.records):
            at = (series.key.module, series.key.tensor_name, record.iteration, record.micro_batch)
            assert at not in found
            found[at] = (series.torch(i), record)
    return found


@pytest.mark.slow
def test_sample_keeps_whole_calls_by_the_rule_alone(daemon: Daemon, tmp_path: Path) -> None:
    held = job(daemon, tmp_path / "on.pt", CAPD_MODE="sample:1/3")
    plain = train(tmp_path / "off.pt")

    calls = [(i, m) for i in range(ITERATIONS) for m in range(MICRO_BATCHES) if (i + m) % 3 == 0]
    assert calls == [(0, 0), (2, 1), (3, 0)]
    expected = {
        (module, name, *call)
        for module in ("0", "3")
        for name in ("input", "weight", "output", "grad_output")
        for call in calls
    }
    found = stored(daemon)
    assert set(found) == expected
    assert [at for at, (tensor, _) in found.items() if not same_bits(tensor, held["operands"][at])] == []

    # A weight is offered with each call until one is kept: 2 + 1 + 0 + 0 … without a kept call twice.
    weights_left_out = 2 * (0 + 2 + 1 + 0 + 2)
    sampled = 2 * 3 * (ITERATIONS * MICRO_BATCHES - len(calls)) + weights_left_out
    assert held["counters"]["dropped"] == {"sampled": sampled}
    assert held["counters"]["offered"] == held["counters"]["committed"] + sampled

    daemon.stop()
    text = capd("stats", str(daemon.store / "run.zarr")).stdout
    assert text.startswith("run ")  # nothing about losses in front
    assert f"left out    {sampled} ({sampled} sampled)" in text
    assert (held["losses"], plain["counters"]["offered"]) == (plain["losses"], 0)
    assert torch.equal(held["random"], plain["random"])


def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What SLICES leave of a tensor, written out."""
    return {
        "input": lambda t: t[:2],
        "weight": lambda t: t[::3],
        "output": lambda t: t[:, 4:6],
        "grad_output": lambda t: t[:, :, ::2],
    }[name](tensor)


SLICES = {"input": "first:2", "weight": "stride:3", "output": "tokens:4-9", "grad_output": "stride:2@2"}


def test_slices_are_the_rows_of_what_the_job_held_and_say_of_what(daemon: Daemon, tmp_path: Path) -> None:
    held = job(daemon, tmp_path / "on.pt", JOB_SLICES=json.dumps(SLICES))
    plain = train(tmp_path / "off.pt")

    found = stored(daemon)
    operands = held["operands"]
    kept = {at for at in operands if at[1] != "weight" or at[3] == 0}  # a weight once per step
    assert set(found) == kept
    for at, (tensor, record) in found.items():
        whole, expected = operands[at], cut(at[1], operands[at]).contiguous()
        assert same_bits(tensor, expected), at
        assert tuple(record.shape) == tuple(expected.shape)
        assert record.metadata == {"slice": {"take": SLICES[at[1]], "of": list(whole.shape)}}
        assert record.stats.count == expected.numel()
        assert record.stats.absmax == expected.abs().max().item()

    raw = json.loads(capd("stats", str(daemon.store / "run.zarr"), "--json").stdout)["raw_bytes"]
    assert raw == sum(cut(at[1], operands[at]).nbytes for at in kept)
    assert held["counters"]["dropped"] == {}
    assert held["losses"] == plain["losses"]
    assert torch.equal(held["random"], plain["random"])


@pytest.mark.slow
def test_a_slice_from_the_environment_leaves_weights_whole(daemon: Daemon, tmp_path: Path) -> None:
    held = job(daemon, tmp_path / "on.pt", CAPD_SLICE="first:1", CAPD_MODE="sample:1/4")

    for at, (tensor, _) in stored(daemon).items():
        assert same_bits(tensor, held["operands"][at][: None if at[1] == "weight" else 1]), at


def thinned_by_the_rule(pages: int) -> tuple[set[Moment], dict[str, int]]:
    """What an arena of so many pages takes while nothing is acknowledged, and the drops; each capture takes a page."""
    kept: set[Moment] = set()
    dropped = {"arena_full": 0, "thinned": 0}
    factor, full = 1, False
    for iteration in range(ITERATIONS):
        weights_due = True
        for micro_batch in range(MICRO_BATCHES):
            factor, full = (2 * factor, False) if full else (factor, False)
            keeps = (iteration + micro_batch) % factor == 0
            forward = ["input", "weight", "output"] if weights_due else ["input", "output"]
            offers = [(module, name) for module in ("0", "3") for name in forward]
            weights_due = weights_due and not keeps
            for module, name in [*offers, ("3", "grad_output"), ("0", "grad_output")]:
                if not keeps:
                    dropped["thinned"] += 1
                elif len(kept) < pages:
                    kept.add((module, name, iteration, micro_batch))
                else:
                    dropped["arena_full"] += 1
                    full = True
    return kept, dropped


@pytest.mark.fault
def test_thin_captures_whole_calls_while_the_daemon_stands_still(daemon: Daemon, tmp_path: Path) -> None:
    signals = {"connected": signal.SIGSTOP, "trained": signal.SIGCONT}
    held = job(
        daemon,
        tmp_path / "on.pt",
        lambda line: daemon.send(signals[line]),
        JOB_PAUSES="1",
        CAPD_POLICY="thin",
        CAPD_ARENA_BYTES=str(16 * 4096),  # one page is the counters'
    )
    plain = train(tmp_path / "off.pt")

    kept, dropped = thinned_by_the_rule(pages=15)
    assert {at[2:] for at in kept} == {(0, 0), (0, 1), (1, 0)}
    found = stored(daemon)
    assert set(found) - {("", "connected", 0, 0)} == kept
    assert [at for at in kept if not same_bits(found[at][0], held["operands"][at])] == []
    counters = held["counters"]
    assert counters["in_flight"] == 0
    assert counters["offered"] == counters["committed"] + sum(counters["dropped"].values())
    assert counters["dropped"] == dropped

    daemon.stop()
    first = capd("stats", str(daemon.store / "run.zarr")).stdout.splitlines()[0]
    assert "captures were dropped" in first
    assert "CAPD_ARENA_BYTES" in first
    assert held["losses"] == plain["losses"]
    assert torch.equal(held["random"], plain["random"])
