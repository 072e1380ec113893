"""watch(): what it accepts, what it leaves alone, and that nothing of it stays behind or gets in the way."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from capd_client.config import watch_arguments
from capd_client.config.settings import ClientConfig
from capd_client.errors import ConfigError
from capd_client.process.log import RateLimitedLog
from capd_client.protocol.key import Key
from capd_client.protocol.kinds import LINEAR
from capd_client.watching import watch as watch_calls
from capd_client.watching import watched
from capd_client.watching.watch import watch
from tests.kit.client.models import MLP, Blocks
from tests.kit.client.sink import MemorySink


def hook_count(model: nn.Module) -> int:
    return sum(
        len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules()
    ) + sum(len(p._backward_hooks or ()) for p in model.parameters())


@pytest.fixture(autouse=True)
def _fresh_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_arguments, "_notices", RateLimitedLog())


def test_off_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_calls, "session", lambda: None)
    model = MLP()

    handle = watch(model, steps="nonsense", tensors=["nonsense"])
    handle.remove()

    assert hook_count(model) == 0
    assert handle.modules == ()


def test_remove_takes_everything_away_even_from_a_graph_under_way(sink: MemorySink) -> None:
    model = Blocks()
    handle = watch(model, tensors=LINEAR.tensors)
    loss = model(torch.randn(2, 6)).sum()
    forward_captures = len(sink.captured)

    handle.remove()
    handle.remove()
    loss.backward()
    model(torch.randn(2, 6)).sum().backward()

    assert forward_captures == 15
    assert len(sink.captured) == forward_captures
    assert hook_count(model) == 0


def test_a_removed_watch_can_be_replaced(sink: MemorySink) -> None:
    model = MLP()
    watch(model, tensors=["input"]).remove()
    watch(model, tensors=["output"])

    model(torch.randn(2, 6))

    assert dict(sink.names()) == {"output": 2}


def test_a_watched_model_is_freed_with_its_last_reference(sink: MemorySink) -> None:
    model = MLP()
    watch(model, tensors=LINEAR.tensors)
    model(torch.randn(2, 6)).sum().backward()
    reference = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()


def copies(model: nn.Module) -> dict[str, nn.Module]:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "copy": copy.copy(model),
        "pickle": pickle.loads(pickle.dumps(model)),  # noqa: S301 - our own bytes
        "torch.save": torch.load(buffer, weights_only=False),
    }


def test_copies_of_a_watched_model_compute_the_same_and_are_not_captured(sink: MemorySink) -> None:
    model = MLP()
    keys = list(model.state_dict())
    watch(model, tensors=LINEAR.tensors)
    x = torch.randn(2, 5, 6)
    expected = model(x)
    expected.sum().backward()
    before = [c for c in sink.captured if c.key.module == "fc1"]

    for kind, twin in copies(model).items():
        assert torch.equal(twin(x), expected), kind
        assert list(twin.state_dict()) == keys
    # A shallow copy shares its submodules with the original: those stay watched, its root does not count.
    deep = copy.deepcopy(model)
    sink.captured.clear()
    deep(x).sum().backward()

    assert len(before) == 5
    assert sink.captured == []
    assert sink.context.micro_batch == 0
    watch(deep)
    deep(x)
    assert len(sink.captured) == 6


def test_a_module_that_has_taken_over_the_hooks_of_another_is_not_captured(sink: MemorySink) -> None:
    model = MLP()
    watch(model)
    twin = nn.Linear(6, 8)
    twin.__dict__.update(model.fc1.__dict__)

    twin(torch.randn(2, 6))

    assert twin._forward_pre_hooks
    assert sink.captured == []


def test_an_output_can_be_saved_without_a_warning(sink: MemorySink) -> None:
    model = MLP()
    watch(model)

    torch.save(model.fc2(torch.randn(2, 8)), io.BytesIO())  # torch warns of hooks that are lost by saving

    assert sink.names()["output"] == 1


WHERE = {
    "input": "forward pre-hook",
    "output": "forward hook",
    "grad_output": "grad_output hook",
    "grad_input": "grad_input hook",
    "grad_weight": "grad_weight hook",
}


def test_errors_inside_a_tap_are_counted_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(MemorySink):
        def offer(self, tensor: torch.Tensor, key: Key, *args: Any, **kwargs: Any) -> None:
            if key.tensor_name in failing:
                raise RuntimeError("broken sink")

    broken = Broken()
    monkeypatch.setattr(watch_calls, "session", lambda: broken)
    model = MLP()
    watch(model, tensors=LINEAR.tensors)

    for name, place in WHERE.items():
        failing = {name}
        broken.errors.clear()
        model.zero_grad()
        model(torch.randn(2, 6)).sum().backward()
        assert (f"{place} of fc2", "broken sink") in [
            (where, str(error)) for where, error in broken.errors
        ], name

    assert model.fc1.weight.grad is not None


def test_an_error_while_attaching_leaves_the_model_unwatched(
    sink: MemorySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    model = MLP()
    monkeypatch.setattr(watched, "ForwardHook", fail)

    watch(model)

    assert hook_count(model) == 0
    ((where, _),) = sink.errors
    assert where == "watch"
    sink.errors.clear()


def test_select_takes_globs_over_clean_names(sink: MemorySink) -> None:
    model = Blocks()

    assert watch(model, select="layers.*").modules == ("layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2")
    other = Blocks()
    assert watch(other, name="actor", select=["actor.inlet", "*.1.2"]).modules == (
        "actor.inlet",
        "actor.layers.1.2",
    )


def test_where_no_tensor_name_is_known_the_default_is_captured(sink: MemorySink) -> None:
    model = MLP()
    watch(model, tensors=["inptu", "weights"])
    model(torch.randn(2, 5, 6)).sum().backward()

    assert set(sink.names()) == set(LINEAR.default_tensors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensors": ["input", "gard_output"]}, "no tensor is called gard_output; known: input, weight"),
        ({"tensors": "weights"}, "no tensor is called weights; known: input, weight"),
        ({"steps": "0..3"}, "cannot read '0..3' as a range"),
        ({"slices": "last:3"}, "cannot read 'last:3' as a slice"),
        ({"slices": {"input": "first:0"}}, "'first:0': the number is not between"),
        ({"slices": {"input": ["first:1"]}}, "watch(slices=...): cannot read ['first:1'] as a slice"),
        (
            {"slices": {"inputs": "first:1"}},
            "watch(slices=...): no tensor is called inputs; known: input, weight",
        ),
        ({"select": "encoder.*"}, "rule 'encoder.*' matches nothing: no module's name fits (fc1, fc2)"),
    ],
)
def test_unusable_arguments_warn_once_and_raise_only_when_strict(
    sink: MemorySink, caplog: pytest.LogCaptureFixture, arguments: dict[str, Any], message: str
) -> None:
    watch(MLP(), **arguments)
    watch(MLP(), **arguments)

    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert message in warnings[0]
    sink.config = ClientConfig(strict=True)
    model = MLP()
    with pytest.raises(ConfigError):
        watch(model, **arguments)
    assert hook_count(model) == 0


def test_unusable_arguments_leave_the_usable_rest(sink: MemorySink) -> None:
    sink.config = ClientConfig(steps="0")
    model = MLP()
    watch(model, tensors=["output", "nonsense"], steps="nonsense")

    model(torch.randn(2, 6))

    assert dict(sink.names()) == {"output": 2}


def shapes(sink: MemorySink) -> dict[str, tuple[int, ...]]:
    """Of each tensor of the first Linear that was captured."""
    return {c.key.tensor_name: tuple(c.value.shape) for c in sink.captured if c.key.module == "fc1"}


WHOLE = {
    "input": (5, 6), "weight": (8, 6), "output": (5, 8),
    "grad_output": (5, 8), "grad_input": (5, 6), "grad_weight": (8, 6),
}  # fmt: skip
CUT = WHOLE | {"input": (2, 6), "output": (2, 8), "grad_output": (2, 8), "grad_input": (2, 6)}


@pytest.mark.parametrize(
    ("default", "slices", "expected"),
    [
        (None, None, WHOLE),
        (None, "first:2", CUT),
        ("first:2", None, CUT),
        ("first:2", {}, WHOLE),
        ("first:2", "nonsense", CUT),
        ("first:2", "first:3", CUT | {"input": (3, 6), "output": (3, 8), "grad_output": (3, 8), "grad_input": (3, 6)}),
        (None, {"weight": "stride:3", "grad_output": "first:1@1"}, WHOLE | {"weight": (3, 6), "grad_output": (5, 1)}),
        (None, {"grad_weight": "first:1", "nonsense": "first:1"}, WHOLE | {"grad_weight": (1, 6)}),
    ],
)  # fmt: skip
def test_slices_cut_activations_and_weights_only_by_name(
    sink: MemorySink, default: str | None, slices: Any, expected: dict[str, tuple[int, ...]]
) -> None:
    sink.config = ClientConfig(steps="all", slice=default)
    model = MLP()
    watch(model, tensors=LINEAR.tensors, slices=slices)
    x = torch.randn(5, 6, requires_grad=True)

    model(x).square().sum().backward()

    assert shapes(sink) == expected


def test_watch_says_which_tensors_it_slices(sink: MemorySink, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="capd_client"):
        watch(MLP(), slices={"input": "first:64"})

    assert "input (first:64), weight, output, grad_output in steps" in caplog.text


def test_watch_says_what_it_captures_and_how_to_widen_it(
    sink: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="capd_client"):
        watch(MLP(), steps="0-2")

    (line,) = [r.getMessage() for r in caplog.records]
    assert "2 of 2 products of MLP (2 linear)" in line
    assert 'steps "0-2"' in line
    assert 'steps="all"' in line
    assert "CAPD_STEPS" in line


def test_the_devices_of_the_model_are_set_up_at_watch_on_ranks_that_capture(sink: MemorySink) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    watch(model)
    assert sink.prepared == [{torch.device("cpu"), torch.device("meta")}]

    sink.config = ClientConfig(ranks="1-3")
    watch(MLP())
    assert len(sink.prepared) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_traced_model_is_as_it_is_unwatched(sink: MemorySink) -> None:
    model = Blocks()
    x = torch.randn(4, 6, requires_grad=True)
    traces = [torch.jit.trace(model, x)]
    watch(model, tensors=LINEAR.tensors)
    traces.append(torch.jit.trace(model, x))

    unwatched, ours = ([node.kind() for node in trace.inlined_graph.nodes()] for trace in traces)
    assert ours == unwatched


def test_hooks_that_are_moved_to_another_module_do_nothing(sink: MemorySink) -> None:
    """Quantisation in place registers them at the module that it puts in, without keyword arguments."""
    model = MLP()
    watch(model, tensors=LINEAR.tensors)
    other = nn.Linear(6, 8)
    for hook in model.fc1._forward_pre_hooks.values():
        other.register_forward_pre_hook(hook)
    for hook in model.fc1._forward_hooks.values():
        other.register_forward_hook(hook)

    other(torch.randn(2, 6)).sum().backward()
    torch.compile(other, backend="eager", fullgraph=True)(torch.randn(2, 6)).sum().backward()

    assert sink.captured == []


def test_several_models_are_one_watch(sink: MemorySink) -> None:
    chunks = [MLP(), MLP()]

    handle = watch(chunks, name="stage")
    for chunk in chunks:
        chunk(torch.randn(2, 6)).sum().backward()

    assert handle.modules == ("stage.0.fc1", "stage.0.fc2", "stage.1.fc1", "stage.1.fc2")
    assert [c.at for name in handle.modules for c in sink.of(name, "input")] == [(0, 0, 0)] * 4
    handle.remove()
    assert [hook_count(chunk) for chunk in chunks] == [0, 0]


def test_several_models_without_names_in_common_keep_theirs(sink: MemorySink) -> None:
    first, last = nn.Sequential(nn.Linear(6, 6)), nn.ModuleDict({"head": nn.Linear(6, 2)})

    assert watch([first, last]).modules == ("0", "head")
