"""Comparisons of small runs: pairs of samples, limits, and what cannot be compared."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capd.errors import ConfigError, ContradictoryParts, NothingMatched
from capd.layouts.divergence import first_divergence
from capd.layouts.judging import Comparison, judge, tasks_of
from capd.layouts.limits import Limits
from capd.layouts.samples import paired_samples
from capd.layouts.views import aspects_of
from capd.layouts.whole_run import WholeRun
from capd.store.read.store import open_store
from capd_client.protocol.key import Moment
from tests.kit.store.cli import StoreWriter
from tests.kit.store.parts import linear, placed

EPS = 2.0**-24
DRAW = np.random.default_rng(7)
X = [DRAW.standard_normal((3, 2, 4)).astype(np.float32) for _ in range(4)]
W = DRAW.standard_normal((4, 4)).astype(np.float32)
Records = list[tuple[Any, np.ndarray[Any, Any], dict[str, Any], int, int]]


def products(samples: list[int], rank: int = 0, *, by: float = 1.0, **attributes: Any) -> Records:
    """Input and output of one linear for each micro-batch; the output is wrong by a factor."""
    found: Records = []
    for number, sample in enumerate(samples):
        for tensor, values in (("input", X[sample]), ("weight", W), ("output", by * (X[sample] @ W.T))):
            if tensor != "weight" or number == 0:
                found.append((linear(tensor, rank=rank), values, attributes, number, len(found)))
    return found


def write(root: Path, records: Records) -> WholeRun:
    writer = StoreWriter(root, "node0")
    for key, values, attributes, micro_batch, order in records:
        moment = Moment(iteration=0, micro_batch=micro_batch, time_ns=1 + order)
        writer.put("run", key, values.astype(np.float32), "float32", moment, attributes=attributes)
    return WholeRun(open_store(writer.close() / "run.zarr"))


def compared(reference: WholeRun, other: WholeRun, *noise: WholeRun, rule: str = "content") -> Comparison:
    aspects = aspects_of(reference, other, None)
    samples = paired_samples(reference, other, aspects.found, rule)
    found = Comparison(reference, other, samples, Limits(reference, noise, 4.0), aspects)
    assert len(list(judge(found, tasks_of(found)))) == len(found.judgements)
    return found


def dealt(samples: tuple[list[int], list[int]]) -> Records:
    """Two data parallel ranks with samples of their own."""
    return [
        record
        for rank, own in enumerate(samples)
        for record in products(own, rank, dp_rank=rank, dp_size=2, batch_dims=["dp"])
    ]


def test_samples_are_paired_by_content_however_they_are_dealt(tmp_path: Path) -> None:
    reference = write(tmp_path / "a", products([0, 1, 2, 3]))
    for number, ranks in enumerate((([0, 2], [1, 3]), ([3, 0], [2, 1]))):
        found = compared(reference, write(tmp_path / f"b{number}", dealt(ranks)))
        assert (found.samples.rule, len(found.samples.pairs), found.samples.unpaired) == ("content", 4, 0)
        assert found.beyond == []
        assert all(one.is_bit_equal for one in found.judgements)
        assert len(found.judgements) == 9


def test_a_formula_pairs_other_samples_than_the_content(tmp_path: Path) -> None:
    reference = write(tmp_path / "a", products([0, 1, 2, 3]))
    sequential = write(tmp_path / "b", dealt(([0, 2], [1, 3])))
    assert compared(reference, sequential, rule="megatron").beyond == []
    halved = write(tmp_path / "c", dealt(([0, 1], [2, 3])))
    assert compared(reference, halved, rule="megatron").beyond
    with pytest.raises(ConfigError, match=r"a micro-batch of .* has several rows"):
        compared(reference, halved, rule="interleaved")
    with pytest.raises(ConfigError, match="--samples 'random'"):
        compared(reference, halved, rule="random")


def test_inputs_that_differ_by_rounding_are_paired_with_the_nearest(tmp_path: Path) -> None:
    reference = write(tmp_path / "a", products([0, 1, 2, 3]))
    near = [
        (key, values * np.float32(1 + 1e-6), told, at, order)
        for key, values, told, at, order in products([2, 0, 3, 1])
    ]
    found = compared(reference, write(tmp_path / "b", near))
    assert (found.samples.rule, len(found.samples.pairs)) == ("nearest", 4)
    # 1e-6 is 17 eps; a guess for the first module allows four.
    assert len(found.beyond) == len(found.judgements)


def test_the_memory_of_pairing_does_not_follow_the_size_of_the_samples(tmp_path: Path) -> None:
    number, shape = 24, (512, 512)
    for name in ("a", "b"):
        draw = np.random.default_rng(3)
        scale = np.float32(1.0 if name == "a" else 1 + 1e-6)
        records: Records = []
        for at in range(number):
            values = scale * draw.standard_normal(shape).astype(np.float32)
            records.append((linear("input"), values, {}, at, at))
        write(tmp_path / name, records)
    runs = [WholeRun(open_store(tmp_path / name / "run.zarr")) for name in ("a", "b")]
    aspects = aspects_of(*runs, None)

    tracemalloc.start()
    found = paired_samples(*runs, aspects.found)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert (found.rule, found.unpaired) == ("nearest", 0)
    assert all(one.micro_batch == other.micro_batch for one, other in found.pairs.items())
    # All samples of both runs are 48 MiB, and twice that in float64.
    assert peak < 16 << 20


def test_the_limit_is_a_multiple_of_the_noise(tmp_path: Path) -> None:
    reference = write(tmp_path / "a", products([0, 1]))
    noise = write(tmp_path / "n", products([0, 1], by=1 + 2e-5))
    inside = compared(reference, write(tmp_path / "b", products([0, 1], by=1 + 7e-5)), noise)
    assert inside.beyond == []
    outside = compared(reference, write(tmp_path / "c", products([0, 1], by=1 + 9e-5)), noise)
    assert [str(one.aspect.name) for one in outside.beyond] == ["layers.0.fc1.forward.output"] * 2
    assert outside.beyond[0].limit == pytest.approx(8e-5, rel=0.01)
    [weight] = [one for one in inside.judgements if one.aspect.name.tensor == "weight"]
    assert weight.limit == 2 * EPS
    stranger = write(tmp_path / "x", [(linear("input", module="other"), X[0], {}, 0, 0)])
    with pytest.raises(NothingMatched, match="a noise run has the reference's layout"):
        compared(reference, reference, stranger)


def test_the_first_divergence_is_a_result_whose_inputs_agree(tmp_path: Path) -> None:
    reference = write(tmp_path / "a", products([0, 1]))
    found = compared(reference, write(tmp_path / "b", products([0, 1], by=1.05)))
    first = first_divergence(found.judgements)
    assert first is not None
    assert str(first.judgement.aspect.name) == "layers.0.fc1.forward.output"
    assert first.inputs_agree
    assert first.text == "layers.0.fc1.forward.output, whose captured inputs agree"
    assert first_divergence(compared(reference, reference).judgements) is None


def test_operands_are_judged_before_the_result_that_was_captured_first(tmp_path: Path) -> None:
    """A weight may be captured after the output; the output must not be named for it."""
    reference = write(tmp_path / "a", [(*record[:-1], 9 - record[-1]) for record in products([0])])
    wrong = [
        (key, values * (1 if key.tensor_name == "input" else 2), *rest)
        for key, values, *rest in products([0])
    ]
    found = compared(reference, write(tmp_path / "b", wrong))
    assert [one.aspect.name.tensor for one in found.judgements] == ["weight", "input", "output"]
    first = first_divergence(found.judgements)
    assert first is not None
    assert (first.judgement.aspect.name.tensor, first.is_operand) == ("weight", True)
    alone = first_divergence(found.judgements[2:])
    assert alone is not None
    assert alone.inputs_agree


def test_replicas_that_differ_are_beyond_although_the_first_agrees(tmp_path: Path) -> None:
    reference = write(tmp_path / "a", products([0]))
    both = [
        record
        for rank in range(2)
        for record in products([0], rank, by=1 + 1e-3 * rank, batch_dims=[], **placed("tp", "R", rank, 2))
    ]
    found = compared(reference, write(tmp_path / "b", both))
    [one] = found.beyond
    assert (one.aspect.name.tensor, one.fit.error) == ("output", 0.0)
    assert one.spread > 1e-4


def test_shapes_that_differ_are_told(tmp_path: Path) -> None:
    reference = write(tmp_path / "a", products([0]))
    other = [
        (key, values[:2] if key.tensor_name == "output" else values, *rest)
        for key, values, *rest in products([0])
    ]
    [one] = compared(reference, write(tmp_path / "b", other)).beyond
    assert one.reason == "shape [3, 2, 4] against [2, 2, 4]"


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = [*products([0]), (linear("input", quant_type="mxfp8"), X[0], {}, 0, 9)]
    with pytest.raises(ConfigError, match=r"two tensors are layers.0.fc1.forward.input .*select one"):
        write(tmp_path, twice)


def test_contradictory_placements_are_refused(tmp_path: Path) -> None:
    reference = write(tmp_path / "a", products([0]))
    odd = [(key, values, placed("tp", "S(9)", 0, 1), *rest) for key, values, _, *rest in products([0])]
    with pytest.raises(ContradictoryParts):
        compared(reference, write(tmp_path / "b", odd))
