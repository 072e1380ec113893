"""Each record of a watch says which emulation was active in its model, also where that changes amid the job."""

from __future__ import annotations

import torch
from memory_sink import MemorySink
from small_models import MLP

from capd_client import emulated
from capd_client.hooks import watch


def said(sink: MemorySink) -> dict[str, set[str]]:
    """By module, what the records say; they are forgotten."""
    found: dict[str, set[str]] = {}
    for captured in sink.captured:
        assert captured.attributes is not None
        found.setdefault(captured.key.module, set()).add(captured.attributes["emulation"])
    sink.captured.clear()
    return found


def test_the_records_of_a_model_say_its_own_emulation(sink: MemorySink) -> None:
    actor, critic = MLP(), MLP()
    end = emulated.begin([actor], "a recipe")
    watch(actor, name="actor", steps="all")
    watch(critic, name="critic", steps="all")

    for model in (actor, critic):
        model(torch.ones(2, 6)).sum().backward()
    assert said(sink) == {
        "actor.fc1": {"a recipe"}, "actor.fc2": {"a recipe"}, "critic.fc1": {"none"}, "critic.fc2": {"none"}
    }  # fmt: skip

    end()
    end()  # a second time it has no effect
    actor(torch.ones(2, 6)).sum().backward()
    assert said(sink) == {"actor.fc1": {"none"}, "actor.fc2": {"none"}}


def test_of_two_emulations_of_a_model_the_one_begun_last_is_said_until_it_ends() -> None:
    model = MLP()
    first = emulated.begin([model], "first")
    second = emulated.begin([model.fc1], "second")

    assert (emulated.text_of(model.fc1), emulated.text_of(model.fc2), emulated.current()) == (
        "second", "first", "second"
    )  # fmt: skip
    first()
    assert (emulated.text_of(model.fc1), emulated.text_of(model.fc2), emulated.current()) == (
        "second", "none", "second"
    )  # fmt: skip
    second()
    assert (emulated.text_of(model.fc1), emulated.current()) == ("none", "none")
