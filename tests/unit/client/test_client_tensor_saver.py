"""The predecessor's calls: signatures, what reaches the record, sources of rank and sample, and that nothing raises."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from client_peer import Peer

import capd_client
from capd_client import collection_state, ranks, tensor_saver, told_capture
from capd_client.collection_state import STATE, TensorCollectionState
from capd_client.reference import parse_reference
from capd_client.tensor_saver import TensorSaver, get_tensor_saver, save_tensor

EMPTY = inspect.Parameter.empty
TENSOR = torch.arange(6.0).view(2, 3)
TAIL = {"rank": None, "sample_idx": None, "metadata": None}
SAVE_TENSOR = {
    "tensor": EMPTY, "layer_type": EMPTY, "operation": EMPTY, "quant_type": EMPTY, "tensor_name": EMPTY,
    "layer_idx": None, "phase": "unknown", "component": "unknown", **TAIL,
}  # fmt: skip
SAVE_ATTENTION = {
    "query": EMPTY, "key": EMPTY, "value": EMPTY, "quant_type": EMPTY, "operation": "forward", "layer_idx": None,
    "phase": "pre", "component": "FA", "rank": None, "sample_idx": None, "attention_weights": None, "metadata": None,
}  # fmt: skip
SAVE_LINEAR = {
    "input_tensor": EMPTY, "weight": EMPTY, "quant_type": EMPTY, "operation": "forward", "layer_idx": None,
    "phase": "pre", "component": "linear", **TAIL,
}  # fmt: skip
INITIALIZE = {"rank": None, "sample_idx": None, "iteration": 0, "batch_idx": 0, "sequence_idx": 0}
SIGNATURES: dict[str, dict[str, Any]] = {
    "save_tensor": SAVE_TENSOR,
    "save_attention_tensors": SAVE_ATTENTION,
    "save_linear_tensors": SAVE_LINEAR,
    "initialize_tensor_collection": INITIALIZE,
    "get_tensor_saver": {},
    "set_global_rank": {"rank": EMPTY},
    "set_global_sample_idx": {"sample_idx": EMPTY},
    "set_global_iteration": {"iteration": EMPTY},
    "set_global_batch_idx": {"batch_idx": EMPTY},
    "set_global_sequence_idx": {"sequence_idx": EMPTY},
    "get_current_rank_and_sample": {},
    "get_tensor_collection_state": {},
    "get_current_rank": {},
    "get_rank_from_tensor_device": {"tensor": EMPTY},
    "set_iteration": {"iteration": EMPTY},
    "mark_collection_completed": {},
    "should_collect_tensor": {},
}
METHODS: dict[str, dict[str, Any]] = {
    "__init__": {"save_dir": "./enhanced_tensor_logs", "enabled": True},
    "save_tensor": SAVE_TENSOR,
    "save_attention_tensors": SAVE_ATTENTION,
    "save_linear_tensors": SAVE_LINEAR,
    "set_iteration": {"iteration": EMPTY},
    "mark_collection_completed": {},
    "should_collect_tensor": {},
    "should_exit_after_forward": {},
    "mark_warmup_collection": {},
    "should_collect_in_steady_state": {},
}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has the state of a process that has called nothing yet."""

    def forget() -> None:
        STATE.__init__()  # type: ignore[misc]
        STATE.on_change = told_capture._changed
        collection_state._said.clear()
        for notices in (collection_state._notices, told_capture._notices):
            notices._last.clear()
        tensor_saver._saver = told_capture._followed = None

    forget()
    yield
    forget()


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    assert {p.kind for p in parameters.values()} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return {name: parameter.default for name, parameter in parameters.items() if name != "self"}


@pytest.mark.parametrize("name", SIGNATURES)
def test_functions_have_the_predecessors_signatures(name: str) -> None:
    found = defaults(getattr(tensor_saver, name))

    assert list(found.items()) == list(SIGNATURES[name].items())
    assert name in tensor_saver.__all__


@pytest.mark.parametrize("name", METHODS)
def test_methods_have_the_predecessors_signatures(name: str) -> None:
    assert list(defaults(getattr(TensorSaver, name)).items()) == list(METHODS[name].items())


def test_everything_public_is_one_of_these() -> None:
    assert {*SIGNATURES, "TensorSaver", "TensorCollectionState"} == set(tensor_saver.__all__)


def one(on: Peer) -> Any:
    assert capd_client.flush(10)
    (record,) = on.records
    return record


def save(**arguments: Any) -> str | None:
    return save_tensor(TENSOR, "linear", "forward", "mxfp8", "output", **arguments)


def test_a_tensor_is_recorded_under_the_names_it_is_given(on: Peer) -> None:
    reference = save_tensor(
        TENSOR, "linear", "backward", "mxfp8", "input", 7, "pre", "linear", 3, 4, {"use_bias": True}
    )

    record = one(on)
    key, moment = record.key, record.descriptor.moment
    assert (key.layer_type, key.operation, key.quant_type, key.tensor_name) == (
        "linear", "backward", "mxfp8", "input",
    )  # fmt: skip
    assert (key.layer, key.phase, key.component, key.rank, key.module) == (7, "pre", "linear", 3, "")
    assert (moment.sample_idx, moment.batch_idx, moment.sequence_idx, moment.call) == (4, 0, 0, 0)
    assert record.data == TENSOR.numpy().tobytes()
    assert record.descriptor.metadata == b'{"use_bias":true}'
    assert reference is not None
    fields, when = parse_reference(reference)
    assert fields["tensor_name"] == "input"
    assert (fields["layer"], fields["rank"], when["sample_idx"]) == (7, 3, 4)


def test_what_is_not_said_is_recorded_as_the_predecessor_recorded_it(on: Peer) -> None:
    save()

    key = one(on).key
    assert (key.layer, key.phase, key.component) == (None, "unknown", "unknown")


@pytest.mark.parametrize(
    ("variable", "expected"), [("hifp8", "hifp8"), (None, "fp32")], ids=["a label", "the dtype"]
)
def test_without_a_quant_type_the_variable_labels_else_the_dtype(
    on: Peer, monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: str
) -> None:
    get_tensor_saver()
    if variable is not None:
        monkeypatch.setenv("CUSTOM_QUANT_TYPE", variable)  # behind the begin of the session

    save_tensor(TENSOR, "linear", "forward", None, "output")  # type: ignore[arg-type]

    assert one(on).key.quant_type == expected


def test_group_calls_return_a_reference_for_each_tensor_that_is_there(on: Peer) -> None:
    attention = tensor_saver.save_attention_tensors(
        TENSOR, None, TENSOR + 1, "hifp8", attention_weights=TENSOR + 2  # type: ignore[arg-type]
    )  # fmt: skip
    linear = tensor_saver.save_linear_tensors(TENSOR, None, "hifp8", operation="backward")  # type: ignore[arg-type]

    assert capd_client.flush(10)
    assert list(attention) == ["query", "value", "attention_weights"]
    assert list(linear) == ["input"]
    names = [(r.key.layer_type, r.key.component, r.key.phase, r.key.tensor_name) for r in on.records]
    assert names == [
        *(("attention", "FA", "pre", name) for name in attention),
        ("linear", "linear", "pre", "input"),
    ]
    assert all(isinstance(value, str) and value.startswith("capd:") for value in attention.values())


VERSIONS = {
    "without rank": ({"a": 1},),
    "without sample": (5, {"a": 1}),
    "with both": (5, 6, {"a": 1}),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_positional_calls_of_every_version_mean_what_they_meant(on: Peer, version: str) -> None:
    saver = get_tensor_saver()
    tail = VERSIONS[version]

    saver.save_tensor(TENSOR, "linear", "forward", "bf16", "x", 0, "pre", "linear", *tail)
    saver.save_linear_tensors(TENSOR, None, "bf16", "forward", 0, "pre", "linear", *tail)  # type: ignore[arg-type]
    saver.save_attention_tensors(TENSOR, None, None, "bf16", "forward", 0, "pre", "FA", *tail)  # type: ignore[arg-type]

    assert capd_client.flush(10)
    assert [r.descriptor.metadata for r in on.records] == [b'{"a":1}'] * 3
    assert {r.key.rank for r in on.records} == {0 if len(tail) == 1 else 5}
    assert {r.descriptor.moment.sample_idx for r in on.records} == {6 if len(tail) == 3 else 0}


def test_attention_weights_stand_where_the_version_without_sample_had_them(on: Peer) -> None:
    saver = get_tensor_saver()

    found = saver.save_attention_tensors(
        TENSOR, TENSOR, TENSOR, "bf16", "forward", 0, "pre", "FA", 5, TENSOR + 1, {"a": 1}  # type: ignore[arg-type]
    )  # fmt: skip

    assert capd_client.flush(10)
    assert list(found) == ["query", "key", "value", "attention_weights"]
    assert on.data_of("attention_weights") == [(TENSOR + 1).numpy().tobytes()]
    assert {(r.key.rank, r.descriptor.metadata) for r in on.records} == {(5, b'{"a":1}')}


# -- where rank and sample come from ----------------------------------------------------------------------

RANK_SOURCES = ("argument", "manual", "distributed", "environment", "device")


def stand_in_device(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    monkeypatch.setattr(collection_state, "get_rank_from_tensor_device", lambda _: index)


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
        monkeypatch.setattr(ranks, "distributed_ready", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: numbers["distributed"])
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 64)
    if "environment" in present:
        monkeypatch.setenv("LOCAL_RANK", str(numbers["environment"]))
    if "device" in present:
        stand_in_device(monkeypatch, numbers["device"])

    rank, source = collection_state.rank_of(TENSOR, numbers["argument"] if "argument" in present else None)

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

    assert collection_state.rank_of(TENSOR) == expected


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


# -- the manual state -------------------------------------------------------------------------------------


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


def test_a_fresh_state_reads_as_the_predecessors(monkeypatch: pytest.MonkeyPatch) -> None:
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


# -- nothing raises ---------------------------------------------------------------------------------------


def test_off_every_call_returns_none_and_makes_nothing(fresh: pytest.MonkeyPatch, tmp_path: Any) -> None:
    fresh.chdir(tmp_path)

    assert save() is None
    assert tensor_saver.save_linear_tensors(TENSOR, TENSOR, "bf16") == {"input": None, "weight": None}
    assert (get_tensor_saver().enabled, tensor_saver.should_collect_tensor()) == (False, False)
    assert list(tmp_path.iterdir()) == []


def test_a_saver_that_is_not_enabled_captures_nothing_where_capture_is_on(on: Peer) -> None:
    assert TensorSaver(enabled=False).save_tensor(TENSOR, "linear", "forward", "bf16", "x") is None
    assert TensorSaver("elsewhere").save_tensor(TENSOR, "linear", "forward", "bf16", "x") is not None
    assert one(on).key.tensor_name == "x"


@pytest.mark.parametrize(
    "arguments",
    [
        (None, "linear", "forward", "bf16", "x"),
        ("text", "linear", "forward", "bf16", "x"),
        (TENSOR, 3, "forward", "bf16", "x"),
        (TENSOR, [], "forward", "bf16", "x"),
        (TENSOR, "linear", "forward", "bf16", "x", -1),
        (TENSOR, "linear", "forward", "bf16", "x", "zero"),
        (TENSOR, "linear", "forward", 8, "x"),
        (TENSOR, "linear", "forward", "bf16", "x" * 5000),
        (TENSOR, "linear", "forward", "bf16", "x", 0, "pre", "linear", 2**40),
        (TENSOR.to_sparse(), "linear", "forward", "bf16", "x"),
    ],
    ids=range(10),
)
def test_what_cannot_be_captured_is_a_counted_drop_and_none(on: Peer, arguments: tuple[Any, ...]) -> None:
    assert save_tensor(*arguments) is None

    assert capd_client.flush(10)
    counters = capd_client.counters()
    assert (counters["offered"], counters["committed"], sum(counters["dropped"].values())) == (1, 0, 1)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"dtype": torch.bfloat16, "size": torch.Size([2]), "t": TENSOR, 3: None},
         b'{"dtype":"torch.bfloat16","size":[2],"t":"tensor (2, 3)","3":null}'),
        ({...}, b'{"metadata":"{Ellipsis}"}'),
        ({}, b""),
        ({"big": "x" * 5000}, b""),
        ({"bad": "\ud800"}, b""),
    ],
    ids=["other types", "no mapping", "empty", "large", "no text"],
)  # fmt: skip
def test_metadata_never_costs_the_tensor(on: Peer, metadata: Any, expected: bytes) -> None:
    assert save(metadata=metadata) is not None

    assert one(on).descriptor.metadata == expected


def test_a_dropped_tensor_returns_none(on: Peer, fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("CAPD_ARENA_BYTES", str(1 << 16))

    assert save_tensor(torch.ones(1 << 20), "linear", "forward", "bf16", "x") is None
    assert sum(capd_client.counters()["dropped"].values()) == 1


def test_at_debug_there_is_one_line_for_each_capture(
    on: Peer, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.setenv("CAPD_LOG", "debug")
    fresh.setenv("LOCAL_RANK", "1")
    tensor_saver.set_global_sample_idx(4)
    save(layer_idx=2)
    logging.getLogger("capd_client").setLevel(logging.NOTSET)

    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert lines == [
        "capd: output: rank 1 (env LOCAL_RANK), sample 4, iteration 0, layer linear 2, operation forward, phase unknown"
    ]


def test_a_recomputed_segment_is_captured_once(on: Peer) -> None:
    weight = torch.ones(3, requires_grad=True)

    def segment(x: torch.Tensor) -> torch.Tensor:
        save_tensor(x, "linear", "forward", "bf16", "x")
        return (x * weight).sum()

    get_tensor_saver()
    from torch.utils.checkpoint import checkpoint

    checkpoint(segment, torch.ones(3, requires_grad=True), use_reentrant=True).backward()

    assert one(on).key.tensor_name == "x"


def test_a_tensor_given_as_an_index_is_not_shown_as_that_would_wait_for_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[object] = []
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda tensor, **_: shown.append(tensor) or "a tensor")
    assert collection_state.sample_of(torch.ones(1, dtype=torch.int64, device="meta")) == 0
    assert not shown


def test_an_index_that_cannot_even_be_shown_raises_nothing() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    assert collection_state.sample_of(Broken()) == 0
