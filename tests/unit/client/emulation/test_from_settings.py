"""CAPD_EMULATE reaches every watched model once, never one that quantises by itself, and its failures harm nothing."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capd_client.config.recipe import Recipe
from capd_client.emulation import from_settings
from capd_client.process.log import RateLimitedLog
from capd_client.tensors import emulation_label
from capd_client.watching.watch import watch
from tests.kit.client.models import MLP
from tests.kit.client.sink import MemorySink

MXFP8 = Recipe.of("mxfp8").text()


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("capd_client.tensor_saver", "megatron.core.tensor_saver"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(from_settings, "_own", None)
    monkeypatch.setattr(from_settings, "_said", False)
    monkeypatch.setattr(from_settings, "_notices", RateLimitedLog())
    active: list[Any] = []
    monkeypatch.setattr(from_settings, "_active", active)
    yield
    for emulation in active:
        emulation.remove()
    assert emulation_label.current() == "none"


@pytest.fixture
def told(sink: MemorySink) -> MemorySink:
    sink.config = replace(sink.config, emulate=MXFP8)
    return sink


def outputs(model: nn.Module) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    output: Tensor = model(x)
    output.sum().backward()
    return output.detach()


def test_a_watched_model_is_emulated_from_the_watch_on_and_stays_so(told: MemorySink) -> None:
    model = MLP()
    plain = outputs(model)
    handle = watch(model)
    first = outputs(model)
    handle.remove()
    watch(model, name="again")

    assert not torch.equal(first, plain)
    assert torch.equal(outputs(model), first)
    assert len(from_settings._active) == 1
    assert {captured.attributes["emulation"] for captured in told.captured} == {MXFP8}
    assert torch.equal(told.captured[0].value, torch.randn(4, 6, generator=torch.Generator().manual_seed(1)))


def test_each_of_several_chunks_is_emulated(told: MemorySink) -> None:
    chunks = [MLP(), MLP()]
    watch(chunks)

    assert [emulation_label.text_of(chunk.fc2) for chunk in chunks] == [MXFP8, MXFP8]


def test_a_model_of_which_the_job_emulates_a_part_itself_is_left_alone(told: MemorySink) -> None:
    import capd_client

    model = MLP()
    own = capd_client.emulate(model.fc1, "mxfp4")
    watch(model)

    assert from_settings._active == []
    assert (emulation_label.text_of(model.fc1), emulation_label.text_of(model.fc2)) == (
        Recipe.of("mxfp4").text(),
        "none",
    )
    own.remove()


def test_tensor_savers_saver_takes_away_what_was_put_on(
    told: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    from capd_client.tensor_saver.saver import TensorSaver

    model = MLP()
    plain = outputs(model)
    watch(model)
    TensorSaver(enabled=False)

    assert torch.equal(outputs(model), plain)
    assert "the emulation of its models is removed" in caplog.text
    watch(MLP(), name="later")
    assert from_settings._active == []


def test_a_failure_leaves_the_job_as_it_is_and_is_raised_where_that_is_asked_for(
    told: MemorySink, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(from_settings, "own_quantiser", fail)
    model = MLP()
    plain = outputs(model)
    watch(model)
    assert torch.equal(outputs(model), plain)
    assert "the emulation failed: RuntimeError: no memory" in caplog.text

    told.config = replace(told.config, strict=True)
    with pytest.raises(RuntimeError, match="no memory"):
        watch(MLP(), name="strict")


def test_what_is_no_model_is_said_and_harms_nothing(
    told: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    watch(None)  # type: ignore[arg-type]  # a slip of the job's

    assert "the emulation failed: TypeError" in caplog.text
    told.errors.clear()  # that `watch` itself has counted


def test_a_plan_emulates_nothing(told: MemorySink) -> None:
    told.config = replace(told.config, plan="somewhere")
    watch(MLP())

    assert emulation_label.current() == "none"
