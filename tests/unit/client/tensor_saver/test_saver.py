"""tensor_saver's calls: signatures, what reaches the record, sources of rank and sample, and that nothing raises."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import capd_client
from capd_client import tensor_saver
from capd_client.protocol.reference import parse_reference
from capd_client.session import current
from capd_client.tensor_saver import TensorSaver, get_tensor_saver, save_tensor, saver
from tests.kit.client.peer import Peer

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
    "get_tensor_index_manager": {},
    "set_enabled": {"enabled": EMPTY},
    "set_save_dir": {"save_dir": EMPTY},
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
    "increment_micro_batch": {},
    "should_continue_collection": {},
    "set_enabled": {"enabled": EMPTY},
    "set_save_dir": {"save_dir": EMPTY},
}


pytestmark = pytest.mark.usefixtures("untold")


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    assert {p.kind for p in parameters.values()} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return {name: parameter.default for name, parameter in parameters.items() if name != "self"}


@pytest.mark.parametrize("name", SIGNATURES)
def test_functions_have_tensor_savers_signatures(name: str) -> None:
    found = defaults(getattr(tensor_saver, name))

    assert list(found.items()) == list(SIGNATURES[name].items())
    assert name in tensor_saver.__all__


@pytest.mark.parametrize("name", METHODS)
def test_methods_have_tensor_savers_signatures(name: str) -> None:
    assert list(defaults(getattr(TensorSaver, name)).items()) == list(METHODS[name].items())


def test_everything_public_is_one_of_these() -> None:
    classes = {"TensorSaver", "TensorCollectionState", "TensorIndexManager"}
    assert {*SIGNATURES, *classes} == set(tensor_saver.__all__)


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


def test_what_is_not_said_is_recorded_as_tensor_saver_recorded_it(on: Peer) -> None:
    save()

    key = one(on).key
    assert (key.layer, key.phase, key.component) == (None, "unknown", "unknown")


@pytest.mark.parametrize("given", [None, ""])
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CUSTOM_QUANT_TYPE": "hifp8"}, "hifp8"),
        ({"CUSTOM_QUANT_TYPE": "hifp8", "CAPD_QUANT_TYPE": "mxfp4"}, "mxfp4"),
        ({}, "fp32"),
    ],
    ids=["a label", "capd's own variable first", "the dtype"],
)
def test_without_a_quant_type_the_variable_labels_else_the_dtype(
    on: Peer, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str, given: Any
) -> None:
    get_tensor_saver()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)  # behind the begin of the session

    save_tensor(TENSOR, "linear", "forward", given, "output")

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


def test_a_saver_can_be_switched_off_and_on(on: Peer) -> None:
    assert save() is not None
    tensor_saver.set_enabled(False)
    assert (save(), tensor_saver.should_collect_tensor()) == (None, False)
    tensor_saver.set_enabled(True)

    assert save() is not None
    assert capd_client.flush(10)
    assert len(on.records) == 2


def test_a_directory_that_comes_too_late_is_said_once(on: Peer, caplog: pytest.LogCaptureFixture) -> None:
    save()
    for _ in range(2):
        tensor_saver.set_save_dir("elsewhere")

    assert str(get_tensor_saver().save_dir) == "elsewhere"
    assert save() is not None
    assert caplog.text.count("not to elsewhere") == 1


@pytest.mark.parametrize(
    ("variable", "argument", "limit"),
    [(None, None, 1), ("3", None, 3), (None, 2, 2), ("3", 2, 3), ("x", "y", 1)],
)
def test_micro_batches_are_counted_for_who_asks(
    on: Peer, monkeypatch: pytest.MonkeyPatch, variable: str | None, argument: object, limit: int
) -> None:
    if variable is not None:
        monkeypatch.setenv("COLLECT_MICRO_BATCHES", variable)
    megatron_arguments(monkeypatch, collect_micro_batches=argument)
    found = get_tensor_saver()

    counted = 0
    while found.should_continue_collection():
        found.increment_micro_batch()
        counted += 1

    assert (counted, found.micro_batch_count, found.control_micro_batches) == (limit, limit, limit)
    assert save() is not None  # what is captured does not depend on it
    tensor_saver.set_iteration(1)
    assert found.should_continue_collection()


def test_the_index_manager_counts_what_it_is_told_to_count() -> None:
    manager = tensor_saver.TensorIndexManager()
    layer = ("linear", 3, "forward")

    manager.increment_layer_counter(*layer)  # nobody has asked for its number yet
    assert (manager.get_layer_key(*layer), manager.get_tensor_index(*layer)) == ("linear_L3_forward", 0)
    manager.increment_layer_counter(*layer)
    assert [manager.get_tensor_index(*key) for key in (layer, ("linear", None, "forward"))] == [1, 0]
    assert manager.get_tensor_group_key("linear", None, "forward") == "linear_unknown_forward"
    manager.reset_layer_counter(*layer)
    assert manager.get_tensor_index(*layer) == 0
    assert tensor_saver.get_tensor_index_manager() is tensor_saver.get_tensor_index_manager()


def megatron_arguments(monkeypatch: pytest.MonkeyPatch, **arguments: object) -> None:
    """Megatron's module of its parsed arguments, as far as they are looked at."""
    module = types.ModuleType("megatron.training.global_vars")
    module.get_args = lambda: types.SimpleNamespace(**arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_megatrons_own_argument_switches_on_where_nothing_else_says(
    fresh: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    asked: list[str] = []
    fresh.setattr(current, "session_into", asked.append)
    fresh.setenv("TENSOR_SAVE_DIR", str(tmp_path))
    for directory in ("told", None):
        megatron_arguments(fresh, save_tensors=True, tensor_save_dir=directory)
        saver._saver = None
        get_tensor_saver()

    assert asked == ["told", str(tmp_path)]
    megatron_arguments(fresh, save_tensors=False)
    saver._saver = None
    assert (get_tensor_saver().enabled, len(asked)) == (False, 2)


def test_megatrons_argument_does_not_overrule_an_explicit_off(
    fresh: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    megatron_arguments(fresh, save_tensors=True, tensor_save_dir=str(tmp_path / "logs"))
    fresh.setenv("TENSOR_SAVE_ENABLED", "false")

    assert get_tensor_saver().enabled is False
    assert save() is None
    assert list(tmp_path.iterdir()) == []
