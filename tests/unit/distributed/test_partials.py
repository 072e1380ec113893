"""Partial results: whatever the cut and the order, they merge into what one pass finds, once each."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from capd.analyze.exact import ShortSum
from capd.analyze.format_choice import choices
from capd.analyze.packed.codec import Damaged, pack, unpack
from capd.distributed.tasks.partial import finished, found_in_partial, head_of
from capd.distributed.tasks.planning import planned
from capd.distributed.tasks.question import Question
from capd.distributed.tasks.running import merge_partials, run_task
from capd.distributed.tasks.task import TaskPlan
from capd.errors import CapdError, ConfigError
from capd.io.beside import beside
from capd.io.items import Items, items_of_runs
from capd.io.sample import Sample
from capd.report.document import document, json_text
from capd.report.gather import GatheredRecords, finish, gather_part
from capd.report.page.data import page_data
from capd.report.products.linear_calls import LinearCalls
from capd.report.series import SeriesSummaries
from tests.kit.cluster.sources import varied_run

CHOICES = choices("fp8,nvfp4:16x16,hifp8,mxfp4:axis=-2")
ASKED: dict[str, Any] = {"choices": CHOICES, "channels": True, "per_block": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [varied_run(root / name, name, seed=seed) for seed, name in enumerate(("a", "b"))]


def one_run(runs: list[Path], share: float) -> Items:
    return items_of_runs(runs[:1], [], share)


def all_runs(runs: list[Path], share: float) -> Items:
    return items_of_runs(runs, [], share)


def side_by_side(runs: list[Path], share: float) -> Items:
    return beside({run.stem: items_of_runs([run], [], share) for run in runs})


def empty(share: float) -> GatheredRecords:
    sample = Sample(share) if share < 1 else None
    return GatheredRecords(series=SeriesSummaries(), calls=LinearCalls(), sample=sample)


def shown(found: GatheredRecords) -> tuple[str, dict[str, Any]]:
    """All that a report shows of the records."""
    finish(found, None)
    plain = document(["here"], found, quick=False, choices=CHOICES)
    return json_text(plain), page_data(plain, found, files=False, choices=CHOICES)


def plan_of(items: Items, task_nbytes: int, share: float = 1.0) -> TaskPlan:
    assert items.series is not None
    return planned(items.series, Question.of(empty(share), share, **ASKED), task_nbytes)


@pytest.mark.parametrize("source", [one_run, pytest.param(all_runs, marks=pytest.mark.slow), side_by_side])
@pytest.mark.parametrize(
    ("share", "task_nbytes"),
    [
        (1.0, 60_000),
        pytest.param(1.0, 9000, marks=pytest.mark.slow),
        pytest.param(0.3, 20_000, marks=pytest.mark.slow),
    ],
)
def test_tasks_find_what_one_pass_finds_whatever_the_cut_and_the_order(
    runs: list[Path], source: Any, share: float, task_nbytes: int
) -> None:
    alone = empty(share)
    for _ in gather_part(source(runs, share).found, alone, threads=1, **ASKED):
        pass
    plan = plan_of(source(runs, share), task_nbytes, share)
    partials = [run_task(msgspec.json.encode(task)) for task in plan.tasks]
    assert len(partials) > 5

    random.Random(3).shuffle(partials)
    some = merge_partials(partials[: len(partials) // 2], whole=False)
    merged = merge_partials([*some, *partials])

    assert merged == merge_partials(partials)
    assert shown(finished([merged], len(plan.tasks))) == shown(alone)


def test_a_task_gives_the_same_bytes_each_time(runs: list[Path]) -> None:
    task = plan_of(one_run(runs, 1.0), 50_000).tasks[0]

    assert run_task(task) == run_task(msgspec.to_builtins(task))


def test_what_is_missing_or_overlaps_or_is_of_another_plan_does_not_merge(runs: list[Path]) -> None:
    plan = plan_of(one_run(runs, 1.0), 30_000)
    partials = [run_task(task) for task in plan.tasks[:4]]
    other = run_task(plan_of(one_run(runs, 1.0), 40_000).tasks[1])

    with pytest.raises(CapdError, match=r"those of tasks 0-0, 2-2$"):
        merge_partials([partials[0], partials[2]])
    with pytest.raises(CapdError, match=r"the results of tasks 1-1, 4-\d+ of \d+ are missing"):
        finished([partials[0], partials[2], partials[3]], len(plan.tasks))
    with pytest.raises(CapdError, match="several plans"):
        merge_partials([partials[0], other])
    with pytest.raises(CapdError, match="overlap"):
        merge_partials([merge_partials(partials[:2]), merge_partials(partials[1:3])])
    with pytest.raises(CapdError, match="there are those of tasks none"):
        merge_partials([])


def test_what_no_task_returned_is_refused(runs: list[Path]) -> None:
    partial = run_task(plan_of(one_run(runs, 1.0), 50_000).tasks[0])
    head = head_of(partial)
    assert (head.first, head.last) == (0, 1)

    for changed in (
        b"",
        b"\x93\x01\x02\x03",
        partial[:-1],
        partial[:-9] + bytes(9),
        partial[: len(partial) // 2],
    ):
        with pytest.raises(Damaged):
            found_in_partial(changed)
    with pytest.raises(ConfigError, match="no task"):
        run_task("{}")
    with pytest.raises(ConfigError, match="no JSON"):
        run_task(b"no")


@pytest.mark.parametrize("value", [0, -1, 2**63, -(2**63) - 1, 3 << 5000, -(5 << 900), (1 << 400) + 1])
def test_whole_numbers_of_any_length_are_kept(value: int) -> None:
    assert unpack(pack(value, int), int) == value


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (msgspec.msgpack.encode("text"), int),
        (msgspec.msgpack.encode(True), int),
        (msgspec.msgpack.encode([1, "a"]), list[int]),
        (msgspec.msgpack.encode([1]), dict[int, int]),
        (msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"\xff\xff\xff\xff\x01")), int),
        (msgspec.msgpack.encode(msgspec.msgpack.Ext(2, b"\x00\x00\x00\x00\x01")), int),
        (b"\xc1", int),
    ],
)
def test_bytes_of_another_type_are_refused(data: bytes, kind: Any) -> None:
    with pytest.raises(Damaged):
        unpack(data, kind)


def test_every_changed_byte_of_the_head_is_refused(runs: list[Path]) -> None:
    partial = run_task(plan_of(one_run(runs, 1.0), 60_000).tasks[1])
    assert head_of(partial)[1:] == (1, 2)
    for at in range(300):
        for bit in range(8):
            changed = bytearray(partial)
            changed[at] ^= 1 << bit
            with pytest.raises(Damaged):
                head_of(bytes(changed))


@pytest.mark.parametrize("exponent", [1 << 40, -(1 << 40)])
def test_a_sum_that_would_fill_the_memory_is_refused(exponent: int) -> None:
    with pytest.raises(Damaged, match="a sum in units of"):
        unpack(pack(ShortSum(1, exponent), ShortSum), ShortSum)
    assert unpack(pack(ShortSum(3, -1074), ShortSum), ShortSum) == ShortSum(3, -1074)


def test_a_number_that_is_cut_off_is_refused() -> None:
    with pytest.raises(Damaged):
        unpack(msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"ab")), int)
