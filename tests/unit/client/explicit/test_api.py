"""The public calls in a process: off, on, wrong use, and what they leave behind."""

from __future__ import annotations

import json
import logging
import pkgutil
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import capd_client
from capd_client import api
from capd_client.errors import ConfigError
from tests.kit.client.peer import Peer


def test_every_public_name_exists_and_is_the_documented_set() -> None:
    names = [
        "capture", "close", "counters", "emulate", "flush", "keep", "plan", "scalar", "set_moment", "static_tap",
        "te_features", "watch",
    ]  # fmt: skip
    assert capd_client.__all__ == names
    for name in capd_client.__all__:
        assert callable(getattr(capd_client, name)), name
        assert name in dir(capd_client)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = capd_client.nothing_like_it


def test_no_module_stands_in_the_place_of_a_public_name() -> None:
    """Importing a module sets its name in the package, for good."""
    modules = {module.name for module in pkgutil.iter_modules(capd_client.__path__)}
    assert "api" in modules
    assert not modules & set(capd_client.__all__)


def test_off_does_nothing_at_all(fresh: pytest.MonkeyPatch) -> None:
    capd_client.set_moment(iteration=3)
    capd_client.capture(torch.ones(3), tensor_name="x")
    assert capd_client.flush(0) is True
    assert capd_client.counters() == {"offered": 0, "committed": 0, "in_flight": 0, "dropped": {}}
    assert api.session() is None
    capd_client.close()


def test_a_capture_carries_its_key_and_moment(on: Peer) -> None:
    capd_client.set_moment(iteration=7, micro_batch=2, sample_idx=11)
    for _ in range(2):
        capd_client.capture(
            torch.ones(3, dtype=torch.bfloat16),
            tensor_name="query",
            layer_type="attention",
            component="FA",
            operation="backward",
            phase="post",
            layer=3,
            module="layers.3.attention",
            stack="encoder",
            metadata={"scale": 0.5, "note": "é"},
        )
    assert capd_client.flush(10)

    first, second = on.records
    key = first.key
    assert (key.quant_type, key.rank, key.tensor_name, key.layer, key.phase) == (
        "bf16",
        0,
        "query",
        3,
        "post",
    )
    assert (key.layer_type, key.operation, key.component) == ("attention", "backward", "FA")
    assert (key.module, key.stack) == ("layers.3.attention", "encoder")
    moment = first.descriptor.moment
    assert (moment.iteration, moment.micro_batch, moment.call, moment.sample_idx) == (7, 2, 0, 11)
    assert second.descriptor.moment.call == 1
    assert first.descriptor.metadata == '{"scale":0.5,"note":"é"}'.encode()
    assert capd_client.counters() == {"offered": 2, "committed": 2, "in_flight": 0, "dropped": {}}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_mode_and_no_grad_capture_as_usual(on: Peer, mode: Callable[[], Any]) -> None:
    weight = torch.nn.Parameter(torch.arange(24.0).view(4, 6))
    with mode():
        tensors = [weight, weight, weight.t(), weight * 2, (weight * 2).t(), (weight * 2).to(torch.bfloat16)]
        for tensor in tensors:
            capd_client.capture(tensor, tensor_name="x")
    assert capd_client.flush(10)

    expected = [
        tensor.detach().clone().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors
    ]
    assert [record.data for record in on.records] == expected
    assert [record.descriptor.requires_grad for record in on.records] == [t.requires_grad for t in tensors]


def test_attributes_are_those_of_the_series(on: Peer) -> None:
    placed: dict[str, Any] = {"tp_rank": 0, "tp_size": 2, "tp_placement": "R", "batch_dims": ["dp"]}
    for size in (2, 2, 4):
        placed["tp_size"] = size  # the caller's own dict may change
        capd_client.capture(torch.ones(1), tensor_name="x", attributes=placed)
    assert capd_client.flush(10)
    assert [record.attributes["tp_size"] for record in on.records] == [2, 2, 4]
    assert placed.items() <= on.records[2].attributes.items()


def test_equal_attributes_of_other_types_are_told_apart(on: Peer) -> None:
    for value in (1, True, 1.0, 1):
        capd_client.capture(torch.ones(1), tensor_name="x", attributes={"value": value})
    assert capd_client.flush(10)
    assert [repr(record.attributes["value"]) for record in on.records] == ["1", "True", "1.0", "1"]


def test_overrides_hold_for_one_capture(on: Peer) -> None:
    capd_client.capture(
        torch.ones(1), tensor_name="x", iteration=5, micro_batch=6, batch_idx=7, sequence_idx=8
    )
    capd_client.capture(torch.ones(1), tensor_name="x")
    assert capd_client.flush(10)
    first, second = [record.descriptor.moment for record in on.records]
    assert (first.iteration, first.micro_batch, first.batch_idx, first.sequence_idx) == (5, 6, 7, 8)
    assert (second.iteration, second.micro_batch, second.call, second.batch_idx) == (0, 0, 0, None)


@pytest.mark.parametrize(
    ("dtype", "label"),
    [
        (torch.float32, "fp32"),
        (torch.float16, "fp16"),
        (torch.float64, "fp64"),
        (torch.float8_e4m3fn, "fp8"),
        (torch.float8_e8m0fnu, "fp8"),
        (torch.int16, "int16"),
        (torch.bool, "bool"),
    ],
)
def test_the_label_is_the_dtype_unless_one_is_given(on: Peer, dtype: torch.dtype, label: str) -> None:
    capd_client.capture(torch.zeros(2).to(dtype), tensor_name="x")
    capd_client.capture(torch.zeros(2).to(dtype), tensor_name="x", quant_type="mine")
    assert capd_client.flush(10)
    assert [record.key.quant_type for record in on.records] == [label, "mine"]


def test_a_slice_is_recorded_with_what_it_is_of_and_the_users_metadata(on: Peer) -> None:
    logits = torch.arange(40.0).view(8, 5)
    capd_client.capture(logits, tensor_name="logits", slice="first:3", metadata={"source": "head"})
    assert capd_client.flush(10)

    [record] = on.records
    assert record.data == logits[:3].numpy().tobytes()
    said = {"source": "head", "slice": {"take": "first:3", "of": [8, 5]}}
    assert json.loads(record.descriptor.metadata) == said


def test_a_configured_label_wins_over_the_dtype(on: Peer, fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("CUSTOM_QUANT_TYPE", "hifp8")
    capd_client.capture(torch.ones(1), tensor_name="x")
    assert capd_client.flush(10)
    assert on.records[0].key.quant_type == "hifp8"


def test_optimizer_steps_count_iterations_without_watch(on: Peer) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        capd_client.capture(weight, tensor_name="x")
        weight.sum().backward()
        optimizer.step()
    assert capd_client.flush(10)
    assert [record.descriptor.moment.iteration for record in on.records] == [0, 1, 2]


WRONG: list[dict[str, Any]] = [
    {"layer": -1},
    {"layer": 1.5},
    {"layer": [1]},
    {"phase": 3},
    {"module": "x" * 5000},
    {"iteration": -1},
    {"sample_idx": "x"},
    {"metadata": {"x": object()}},
    {"metadata": {"x": "y" * 5000}},
    {"metadata": ["no", "object"]},
    {"attributes": ["no", "object"]},
    {"attributes": {1: "no name"}},
    {"attributes": {"x": object()}},
    {"attributes": {"x": "y" * (64 << 10)}},
    {"quant_type": 7},
    {"slice": "last:3"},
    {"slice": 3},
    {"slice": ["first:3"]},
    {"slice": "first:1", "metadata": {"slice": "mine"}},
]


def test_wrong_use_is_counted_and_never_raised(on: Peer) -> None:
    capd_client.set_moment(step=3)
    capd_client.set_moment(iteration=-3)
    for wrong in WRONG:
        capd_client.capture(torch.ones(1), tensor_name="x", **wrong)
    capd_client.capture("no tensor", tensor_name="x")  # type: ignore[arg-type]
    capd_client.capture(None, tensor_name="x")  # type: ignore[arg-type]
    assert capd_client.flush(10)
    now = capd_client.counters()
    assert now["offered"] == len(WRONG) + 2
    assert now["dropped"] == {"invalid_key": len(WRONG), "unsupported": 2}


def test_strict_raises_wrong_use(on: Peer, fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("CAPD_STRICT", "1")
    with pytest.raises(ConfigError):
        capd_client.capture(torch.ones(1), tensor_name="x", layer=-1)
    with pytest.raises(ConfigError):
        capd_client.set_moment(step=3)


def test_an_arena_that_cannot_be_made_turns_capture_off(
    on: Peer, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    fresh.setattr("os.memfd_create", refuse)
    capd_client.capture(torch.ones(1), tensor_name="x")
    assert api.session() is None
    assert "capture is off" in caplog.text


def test_a_session_that_cannot_be_started_turns_capture_off(on: Peer, fresh: pytest.MonkeyPatch) -> None:
    """As where a limit on processes allows no further thread."""

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    fresh.setattr("threading.Thread.start", refuse)
    for _ in range(2):
        capd_client.capture(torch.ones(1), tensor_name="x")
    assert api.session() is None
    assert capd_client.counters()["offered"] == 0


def test_counters_stay_after_close_and_captures_end(on: Peer) -> None:
    capd_client.capture(torch.ones(1), tensor_name="x")
    capd_client.close(10)
    capd_client.capture(torch.ones(1), tensor_name="x")
    capd_client.close()
    assert capd_client.counters() == {"offered": 1, "committed": 1, "in_flight": 0, "dropped": {}}
    assert on.byes == 1


def test_a_thousand_failures_are_one_line_of_log(on: Peer, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(1000):
        capd_client.capture(torch.ones(1, dtype=torch.complex64), tensor_name="x")
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert capd_client.counters()["dropped"] == {"unsupported": 1000}


def test_a_host_tensor_declared_immutable_is_copied_as_any_other(on: Peer) -> None:
    tensor = torch.ones(4)
    capd_client.capture(tensor, tensor_name="x", immutable=True)
    tensor.zero_()
    assert capd_client.flush(10)
    assert on.data_of("x") == [torch.ones(4).numpy().tobytes()]


def test_captures_of_threads_that_start_together_all_count(on: Peer) -> None:
    together = threading.Barrier(8)

    def capture() -> None:
        together.wait()
        capd_client.capture(torch.ones(3), tensor_name="t")

    threads = [threading.Thread(target=capture) for _ in range(together.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert capd_client.counters()["offered"] == together.parties


def test_a_log_handler_that_captures_does_not_hold_up_the_start(
    on: Peer, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Capturing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            capd_client.capture(torch.ones(3), tensor_name="logged")

    handler = Capturing()
    fresh.setenv("CAPD_EXIT_TIMEOUT_S", "not a number")  # which is a warning
    logging.getLogger("capd_client").addHandler(handler)
    try:
        capd_client.capture(torch.ones(3), tensor_name="t")
    finally:
        logging.getLogger("capd_client").removeHandler(handler)
    assert "CAPD_EXIT_TIMEOUT_S" in caplog.text
    assert capd_client.counters()["offered"] == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_traced_function_holds_nothing_of_capd(on: Peer) -> None:
    def transposed(x: torch.Tensor) -> torch.Tensor:
        capd_client.capture(x.t(), tensor_name="x", slice="first:1")
        return x * 2

    traced = torch.jit.trace(transposed, torch.ones(2, 3), check_trace=False)

    assert "copy_" not in str(traced.graph)
    assert torch.jit.is_tracing() is False
    assert capd_client.flush(10)
    assert len(on.records) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_tensor_that_is_known_from_before_a_trace_is_captured_in_it_too(on: Peer) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        capd_client.capture(x, tensor_name="x")
        return x * 2

    doubled(torch.ones(3))
    traced = torch.jit.trace(doubled, torch.ones(3), check_trace=False)
    doubled(torch.ones(3))

    assert "numel" not in str(traced.graph)
    assert capd_client.flush(10)
    assert on.data_of("x") == [torch.ones(3).numpy().tobytes()] * 3


def test_a_gradient_belongs_to_the_iteration_of_its_forward_where_the_optimizer_steps_in_the_backward(
    on: Peer,
) -> None:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([second], lr=0.1)
    second.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    for _ in range(2):
        hidden = first * 2
        capd_client.capture(hidden, tensor_name="forward")
        hidden.register_hook(lambda gradient: capd_client.capture(gradient, tensor_name="backward"))
        (hidden * second).sum().backward()

    assert capd_client.flush(10)
    found = [(r.key.tensor_name, r.descriptor.moment.iteration) for r in on.records]
    assert found == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]
