"""Each record of a watch says which emulation was active in its model, also where that changes amid the job."""

from __future__ import annotations

import torch

from capd_client.tensors import emulation_label
from capd_client.watching.watch import watch
from tests.kit.client.models import MLP
from tests.kit.client.sink import MemorySink


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
    end = emulation_label.begin([actor], "a recipe")
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
    first = emulation_label.begin([model], "first")
    second = emulation_label.begin([model.fc1], "second")

    assert (emulation_label.text_of(model.fc1), emulation_label.text_of(model.fc2), emulation_label.current()) == (
        "second", "first", "second"
    )  # fmt: skip
    first()
    assert (emulation_label.text_of(model.fc1), emulation_label.text_of(model.fc2), emulation_label.current()) == (
        "second", "none", "second"
    )  # fmt: skip
    second()
    assert (emulation_label.text_of(model.fc1), emulation_label.current()) == ("none", "none")
