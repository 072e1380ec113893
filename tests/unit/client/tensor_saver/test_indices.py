"""Where tensor_saver's calls take rank and sample from, and the state that is set by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

import capd_client
from capd_client import tensor_saver
from capd_client.tensor_saver import get_tensor_saver, indices
from capd_client.tensor_saver import state as saver_state
from capd_client.tensor_saver.state import TensorCollectionState
from tests.kit.client.peer import Peer
from tests.kit.client.saver_calls import TENSOR, one, save

pytestmark = pytest.mark.usefixtures("untold")


# -- where rank and sample come from ----------------------------------------------------------------------

RANK_SOURCES = ("argument", "manual", "distributed", "environment", "device")


def stand_in_device(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    monkeypatch.setattr(saver_state, "get_rank_from_tensor_device", lambda _: index)


@pytest.mark.parametrize(
    "present", [c for n in range(6) for c in itertools.combinations(RANK_SOURCES, n)], ids="+".join
)
def test_the_rank_is_the_first_sources_in_every_combination(
    monkeypatch: pytest.MonkeyPatch, present: tuple[str, ...]
) -> None:
    numbers = {name: 10 + at for at, name in enumerate(RANK_SOURCES)}
    if "manual" in present:
        tensor_saver.set_global_rank(numbers["manual"])
    if "distributed" in present:
        monkeypatch.setattr(indices, "distributed_ready", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: numbers["distributed"])
    if "environment" in present:
        monkeypatch.setenv("LOCAL_RANK", str(numbers["environment"]))
    if "device" in present:
        stand_in_device(monkeypatch, numbers["device"])

    rank, source = saver_state.rank_of(TENSOR, numbers["argument"] if "argument" in present else None)

    first = next((name for name in RANK_SOURCES if name in present), None)
    assert rank == (0 if first is None else numbers[first])
    names = {None: "default", "distributed": "torch.distributed", "environment": "env LOCAL_RANK"}
    assert source == names.get(first, first)


@pytest.mark.parametrize(
    "present", [c for n in range(4) for c in itertools.combinations(("argument", "manual", "environment"), n)],
    ids="+".join,
)  # fmt: skip
def test_the_sample_is_the_first_sources_in_every_combination(
    on: Peer, monkeypatch: pytest.MonkeyPatch, present: tuple[str, ...]
) -> None:
    numbers = {"argument": 11, "manual": 12, "environment": 13}
    get_tensor_saver()
    if "manual" in present:
        tensor_saver.set_global_sample_idx(12)
    if "environment" in present:
        monkeypatch.setenv("CURRENT_SAMPLE_IDX", "13")

    save(sample_idx=11 if "argument" in present else None)

    first = next((name for name in numbers if name in present), None)
    assert one(on).descriptor.moment.sample_idx == (0 if first is None else numbers[first])


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LOCAL_RANK": "1", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (5, "env RANK")),
        ({"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, (1, "env LOCAL_RANK")),
        ({"LOCAL_RANK": "3"}, (3, "env LOCAL_RANK")),
        ({"RANK": "3"}, (3, "env RANK")),
        ({"RANK": "x", "LOCAL_RANK": "2"}, (2, "env LOCAL_RANK")),
        ({"RANK": "9" * 5000, "LOCAL_RANK": "-1"}, (0, "default")),
    ],
)
def test_the_environments_rank_tells_nodes_apart(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: tuple[int, str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    assert saver_state.rank_of(TENSOR) == expected


def test_variables_are_read_when_a_call_needs_them(on: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (3, 4):
        monkeypatch.setenv("LOCAL_RANK", str(number))
        monkeypatch.setenv("CURRENT_SAMPLE_IDX", str(number + 10))
        save()

    assert capd_client.flush(10)
    assert [(r.key.rank, r.descriptor.moment.sample_idx) for r in on.records] == [(3, 13), (4, 14)]


def test_what_cannot_be_read_is_said_once_and_the_next_source_counts(
    on: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "one")
    monkeypatch.setenv("CURRENT_SAMPLE_IDX", "second")
    for _ in range(3):
        save(rank=-2)

    assert capd_client.flush(10)
    assert {(r.key.rank, r.descriptor.moment.sample_idx) for r in on.records} == {(0, 0)}
    for said in ("RANK='one'", "CURRENT_SAMPLE_IDX='second'", "rank=-2", "recorded as 0"):
        assert caplog.text.count(said) == 1, said


def test_a_tensor_on_the_cpu_tells_no_rank_and_one_on_a_device_tells_its_number() -> None:
    assert tensor_saver.get_rank_from_tensor_device(TENSOR) is None
    assert tensor_saver.get_rank_from_tensor_device(torch.empty(2, device="meta")) is None
    stand_in = type("T", (), {"device": torch.device("cuda", 3)})()
    assert tensor_saver.get_rank_from_tensor_device(stand_in) == 3
    assert tensor_saver.get_rank_from_tensor_device(None) is None  # type: ignore[arg-type]


def test_all_five_of_the_state_reach_the_record_set_by_function_or_by_attribute(on: Peer) -> None:
    tensor_saver.initialize_tensor_collection(rank=5, sample_idx=10, iteration=1, batch_idx=2, sequence_idx=3)
    save()
    state = tensor_saver.get_tensor_collection_state()
    state.current_rank, state.current_sample_idx, state.current_iteration = 6, 11, 4
    state.batch_idx, state.sequence_idx = 7, 8
    save()
    capd_client.capture(TENSOR, tensor_name="own")  # what capd captures itself follows, the rank aside

    assert capd_client.flush(10)
    moments = [r.descriptor.moment for r in on.records]
    assert [r.key.rank for r in on.records] == [5, 6, 0]
    found = [(m.sample_idx, m.iteration, m.batch_idx, m.sequence_idx) for m in moments]
    assert found == [(10, 1, 2, 3), (11, 4, 7, 8), (11, 4, 7, 8)]
    assert tensor_saver.get_current_rank_and_sample() == (6, 11)


def test_a_fresh_state_reads_as_tensor_savers(monkeypatch: pytest.MonkeyPatch) -> None:
    state = TensorCollectionState()

    assert (state.current_rank, state.current_sample_idx) == (None, None)
    assert (state.current_iteration, state.batch_idx, state.sequence_idx) == (0, 0, 0)
    assert (state.get_rank(), state.get_sample_idx(), tensor_saver.get_current_rank()) == (None, None, None)
    assert tensor_saver.get_current_rank_and_sample() == (0, 0)
    monkeypatch.setenv("TENSOR_SAVER_ITERATION", "12")
    assert state.get_iteration() == 12


def test_initialising_again_without_rank_and_sample_leaves_them() -> None:
    tensor_saver.initialize_tensor_collection(rank=5, sample_idx=10)
    tensor_saver.initialize_tensor_collection()

    assert tensor_saver.get_current_rank_and_sample() == (5, 10)


def test_the_first_iteration_comes_from_the_variable_and_then_goes_on_by_itself(
    on: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSOR_SAVER_ITERATION", "12")
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        save()
        weight.sum().backward()
        optimizer.step()

    assert capd_client.flush(10)
    assert [r.descriptor.moment.iteration for r in on.records] == [12, 13]


def test_the_saver_collects_as_the_forks(on: Peer) -> None:
    saver = get_tensor_saver()
    assert saver is get_tensor_saver()
    assert (saver.enabled, saver.should_collect_tensor(), saver.should_exit_after_forward()) == (
        True,
        True,
        False,
    )

    tensor_saver.set_iteration(3)
    tensor_saver.mark_collection_completed()
    assert (saver.current_iteration, saver.should_exit_after_forward()) == (3, True)
    assert save() is not None
    saver.mark_warmup_collection()
    assert (tensor_saver.should_collect_tensor(), saver.should_collect_in_steady_state(), save()) == (
        False,
        False,
        None,
    )
    assert saver.tensor_counter == 1
    assert one(on).descriptor.moment.iteration == 3
