"""`watch` with rules: from the settings, from `select`, under `capd ctl`, in recomputes; what is said of mistakes."""

from __future__ import annotations

import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from capd_client.config import watch_arguments
from capd_client.config.settings import ClientConfig
from capd_client.errors import ConfigError
from capd_client.process.log import RateLimitedLog
from capd_client.rules.schema import parse_rules
from capd_client.steps import shared_rules
from capd_client.steps.shared_rules import shared_rules_of
from capd_client.watching.watch import watch
from tests.kit.client.models import MLP, Blocks, Repeated, non_reentrant, reentrant
from tests.kit.client.sink import MemorySink
from tests.kit.client.steering import OPERANDS, of, steer, taken, train

LAYERS = ("layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2")


def configured(sink: MemorySink, *documents: dict[str, Any], **settings: Any) -> None:
    sink.config = ClientConfig(rules=parse_rules(documents), **{"steps": "all", **settings})


def stored(sink: MemorySink) -> Counter[tuple[int, int, str, str, str | None]]:
    return Counter(
        (c.moment.iteration, c.moment.micro_batch, c.key.module, c.key.tensor_name, c.store)
        for c in sink.captured
    )


def test_rules_of_the_settings_hold_for_a_watch_that_selects_nothing(sink: MemorySink) -> None:
    configured(
        sink, {"include": "inlet", "tensors": "input"}, {"layers": 1, "tensors": "output", "steps": "1"}
    )

    model = Blocks()
    handle = watch(model)
    train(model, steps=3)

    assert set(handle.modules) == {"inlet", "layers.1.0", "layers.1.2"}
    assert taken(sink) == (
        of(0, ["inlet"], ["input"]) + of(1, ["inlet"], ["input"]) + of(2, ["inlet"], ["input"])
        + of(1, ["layers.1.0", "layers.1.2"], ["output"])
    )  # fmt: skip


@pytest.mark.parametrize("as_file", [False, True])
def test_select_takes_rules_and_files_of_rules_in_the_place_of_those_of_the_settings(
    sink: MemorySink, tmp_path: Path, as_file: bool
) -> None:
    configured(sink, {"include": "inlet"})
    path = tmp_path / "rules.toml"
    path.write_text('[[rule]]\nlayers = "0"\noperations = "backward"\n')
    model = Blocks()

    watch(model, select=path if as_file else {"layers": 0, "operations": "backward"})
    train(model)

    assert taken(sink) == of(0, LAYERS[:2], ["grad_output"])


def test_what_a_rule_does_not_say_is_as_the_arguments_have_it(sink: MemorySink) -> None:
    configured(
        sink, {"layers": 0}, {"layers": 1, "steps": "2", "tensors": "weight", "slices": "stride:2"}, steps="9"
    )
    model = Blocks()

    watch(model, steps="1", tensors="input", slices="first:1")
    train(model, steps=3)

    assert taken(sink) == of(1, LAYERS[:2], ["input"]) + of(2, LAYERS[2:], ["weight"])


def test_mode_and_store(sink: MemorySink) -> None:
    configured(sink, {"include": "fc1"}, {"include": "fc2", "store": "both"}, mode="stats")
    model = MLP()

    watch(model, tensors=["input", "grad_output"])
    train(model)

    assert stored(sink) == Counter(
        (0, 0, module, tensor, store)
        for module, store in (("fc1", "stats"), ("fc2", "both"))
        for tensor in ("input", "grad_output")
    )


def test_statistics_always_and_tensors_now_and_then(sink: MemorySink) -> None:
    configured(sink, {"store": "stats"}, {"store": "full", "steps": "0-:2", "micro_batches": "1"})
    model = MLP()
    watch(model, select=None)

    train(model, steps=3, micro_batches=2)

    expected: Counter[tuple[int, int, str, str, str | None]] = Counter()
    for step in range(3):
        for module in ("fc1", "fc2"):
            expected[step, 0, module, "weight", "stats"] = 1
            for micro_batch in range(2):
                full = step % 2 == 0 and micro_batch == 1
                store = "both" if full else "stats"
                expected += Counter(
                    (step, micro_batch, module, name, store) for name in ("input", "output", "grad_output")
                )
                if full:  # until now only its statistics were kept
                    expected[step, 1, module, "weight", "both"] = 1
    assert stored(sink) == expected


@pytest.mark.parametrize("wrap", [reentrant, non_reentrant])
def test_gradients_follow_the_rules_of_their_forward_through_a_recompute(sink: MemorySink, wrap: Any) -> None:
    configured(
        sink,
        {"tensors": ["output", "grad_output", "grad_input", "grad_weight"], "micro_batches": "1"},
        {"tensors": ["input", "grad_output"], "store": "stats", "micro_batches": "0"},
    )
    model = Repeated(times=2, wrap=wrap)
    watch(model)

    losses = [model(torch.randn(2, 4, requires_grad=True)).sum() for _ in range(3)]
    for loss in reversed(losses):  # the last micro-batch first, which no rule captures
        loss.backward()

    found = Counter((c.key.tensor_name, *c.at[1:], c.store) for c in sink.captured)
    assert found == {
        **{("input", 0, call, "stats"): 1 for call in range(2)},
        **{("grad_output", 0, call, "stats"): 1 for call in range(2)},
        **{
            (name, 1, call, "full"): 1
            for name in ("output", "grad_output", "grad_input")
            for call in range(2)
        },
        **{
            ("grad_weight", 1, call, "full"): 1
            for call in range(2 if wrap is reentrant else 1)  # a backward of its own for each segment
        },
    }


def test_a_rank_and_steps_without_any_rule_close_the_gate(sink: MemorySink) -> None:
    sink.begin_at(environ={"RANK": "1", "WORLD_SIZE": "2"})
    configured(sink, {"ranks": 0}, {"ranks": 1, "steps": "1", "tensors": "input"})
    model = MLP()
    handle = watch(model)

    train(model, steps=3)

    assert taken(sink) == of(1, ("fc1", "fc2"), ["input"])
    model(torch.randn(2, 6))
    assert handle.taps[0].gate.closed_at == sink.context.iteration == 3


def test_ctl_steers_on_top_of_rules(sink: MemorySink) -> None:
    configured(
        sink,
        {"layers": 0, "tensors": "input", "steps": "0-:2", "slices": "first:1"},
        {"layers": 1, "tensors": "output", "store": "stats", "steps": "0-:2"},
    )
    model = Blocks()
    watch(model)
    ours = lambda step: of(step, LAYERS[:2], ["input"]) + of(step, LAYERS[2:], ["output"])  # noqa: E731

    train(model, steps=2)
    assert taken(sink) == ours(0)

    steer(sink, steps="all")
    train(model, steps=2)
    assert taken(sink) == ours(2) + ours(3)

    steer(sink, modules=("inlet", "layers.0.*"))
    train(model, steps=2)
    everywhere = of(4, LAYERS[:2], ["input"])
    assert taken(sink) == everywhere + of(4, ["inlet"], OPERANDS) + of(5, ["inlet"], OPERANDS)

    steer(sink, tensors=("input", "weight"))
    train(model, steps=2)
    stores = {c.key.module: c.store for c in sink.captured}
    shapes = {(c.key.module, c.key.tensor_name): c.value.shape for c in sink.captured}
    assert taken(sink) == of(6, LAYERS, ["input", "weight"])
    assert stores == {
        "layers.0.0": "full",
        "layers.0.2": "full",
        "layers.1.0": "stats",
        "layers.1.2": "stats",
    }
    assert shapes["layers.0.0", "input"][0] == 1
    assert shapes["layers.1.0", "input"][0] == 2

    steer(sink, capturing=False)
    train(model)
    assert taken(sink) == Counter()

    steer(sink)
    train(model, steps=2)
    assert taken(sink) == ours(10)


@pytest.mark.parametrize(
    ("select", "said"),
    [
        ({"tensor": "input"}, "watch(select=...): unknown setting tensor in rule '1'; did you mean tensors?"),
        ([{}, 3], "watch(select=...): a selection is a glob"),
        ("nowhere.toml", "nowhere.toml does not exist"),
        ({"include": "(a+)+"}, "can take forever"),
        ({"include": "fc3"}, "rule '1' matches nothing: no module's name fits (fc1, fc2)"),
        ({"tensors": ["input", "query"]}, "none of its 2 modules has query; they have input, weight"),
        ({"tensors": "query"}, "none of its 2 modules has query"),
        ({"layers": 0}, 'layers "0", and its modules are in no layer'),
        ({"ranks": "0-1"}, 'ranks "0-1" name rank 1; this job has rank 0 alone'),
        ([{"slices": "first:1"}, {}], "rules '1' and '2' contradict each other: both capture input of fc1"),
    ],
)
def test_what_cannot_be_meant_is_one_warning_and_an_error_when_strict(
    sink: MemorySink,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    select: Any,
    said: str,
) -> None:
    monkeypatch.setattr(watch_arguments, "_notices", RateLimitedLog())
    model = MLP()
    watch(model, select=select)

    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert said in warnings[0]
    train(model)
    sink.config = ClientConfig(steps="all", strict=True)
    with pytest.raises(ConfigError):
        watch(MLP(), select=select)


def test_a_stage_of_a_pipeline_is_watched_without_complaint(
    sink: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    sink.begin_at(environ={"RANK": "1", "WORLD_SIZE": "2"})
    configured(sink, {"layers": "0-1", "include": "layers"}, strict=True)
    stage = nn.ModuleDict({"layers": nn.ModuleDict({"2": nn.Linear(6, 6), "3": nn.Linear(6, 6)})})

    with caplog.at_level(logging.INFO, logger="capd_client"):
        handle = watch(stage)

    assert handle.modules == ()
    assert "watching 0 of 2 products" in caplog.text
    assert not [r for r in caplog.records if r.levelno > logging.INFO]


def test_the_plan_is_told_once(sink: MemorySink, caplog: pytest.LogCaptureFixture) -> None:
    configured(sink, {"name": "up", "include": "fc1", "slices": "first:2"}, {"layers": 7}, steps="0-3")

    with caplog.at_level(logging.INFO, logger="capd_client"):
        watch(MLP())

    told = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert len(told) == 1
    assert [" ".join(line.split()) for line in told[0].splitlines()] == [
        "capd: watching 1 of 2 products of MLP:",
        "rule modules tensors steps keeps",
        "up 1 linear input (first:2), weight, output (first:2), grad_output (first:2) 0-3 full",
        "2 none - 0-3 full",
    ]


@pytest.mark.parametrize(
    ("rules", "when", "said"),
    [
        ([], "0", 'nothing is captured on rank 1: ranks "0" leave it out'),
        ([], "0-1", ""),
        (
            [{"include": "fc1"}, {"include": "fc2", "ranks": "2-"}],
            "0",
            'nothing is captured on rank 1: ranks "0", ranks "2-" leave it out',
        ),
        (
            [{"name": "up", "ranks": 0}, {"ranks": 1}],
            "all",
            "not captured on rank 1: rule 'up' (ranks \"0\")",
        ),
        ([{"include": "fc1"}, {"include": "fc3", "ranks": 0}], "all", ""),
    ],
)
def test_a_rank_that_is_left_out_is_told_so(
    sink: MemorySink,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    rules: list[dict[str, Any]],
    when: str,
    said: str,
) -> None:
    monkeypatch.setattr(watch_arguments, "_notices", RateLimitedLog())
    sink.begin_at(environ={"RANK": "1", "WORLD_SIZE": "4"})
    configured(sink, *rules, ranks=when)
    model = MLP()

    with caplog.at_level(logging.INFO, logger="capd_client"):
        watch(model)
    train(model)

    told = [r.getMessage().removeprefix("capd: ") for r in caplog.records if "captured on" in r.getMessage()]
    assert told == ([said] if said else [])
    assert bool(sink.captured) is not said.startswith("nothing")


@pytest.mark.usefixtures("forget_graphs")
def test_shared_rules_are_to_blame_only_where_no_model_of_the_job_has_what_they_name(
    sink: MemorySink, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        caplog.clear()
        return found

    monkeypatch.setattr(watch_arguments, "_notices", RateLimitedLog())
    monkeypatch.setattr(shared_rules, "_notices", RateLimitedLog())
    configured(
        sink,
        {"include": "fc1"},
        {"include": "inlet"},
        {"tensors": ["input", "query"]},
        {"include": "nowhere"},
    )
    model = MLP()
    watch(model)
    watch(Blocks())
    watch(nn.MultiheadAttention(8, 2))
    assert said() == []

    train(model)
    assert said() == [
        "capd: MLP: rule '4' matches nothing: no module's name fits (fc1, fc2) "
        "(nor is there in Blocks, MultiheadAttention)"
    ]
    train(model)
    shared_rules_of(sink.context).report()
    assert said() == []


def test_a_model_of_which_shared_rules_want_nothing_is_said_to_give_none(
    sink: MemorySink, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_arguments, "_notices", RateLimitedLog())
    monkeypatch.setattr(shared_rules, "_notices", RateLimitedLog())
    configured(sink, {"include": "fc1"}, {"include": "fc2"})

    watch(MLP())
    watch(nn.Sequential(nn.Linear(2, 2)))
    shared_rules_of(sink.context).report()

    [message] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert message == "capd: Sequential: no rule matches any of its 1 products"


def test_a_strict_job_is_told_at_the_watch(sink: MemorySink) -> None:
    configured(sink, {"include": "fc1"}, {"include": "inlet"}, strict=True)

    with pytest.raises(ConfigError, match="MLP: rule '2' matches nothing"):
        watch(MLP())


def test_a_handle_says_what_it_watches(sink: MemorySink) -> None:
    handle = watch(MLP(), steps="0-3")
    other = watch(Blocks(), select=[{"include": "inlet"}, {"layers": 0, "name": "first"}])

    assert repr(handle) == (
        '<watching 2 of 2 products of MLP (2 linear): input, weight, output, grad_output in steps "0-3">'
    )
    assert re.fullmatch(r"<watching \d of \d products of Blocks by the rules '1', 'first'>", repr(other))
    handle.remove()
    assert repr(handle) == "<watching nothing>"
