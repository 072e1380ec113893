"""`capd_client.plan(model)`: what `watch` would capture, from the model and from steps that run under the plan."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import capd_client
from tests.kit.client.sink import MemorySink


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.attention = Attention()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.attention(x))


def train(model: nn.Module, micro_batches: int = 2) -> None:
    for _ in range(micro_batches):
        model(torch.ones(3, 5, 8)).square().sum().backward()


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def series(plan: capd_client.plan) -> dict[tuple[str, str], Any]:
    [rank] = plan.as_dict()["ranks"]
    return {(one["module"], one["tensor_name"]): one for one in rank["series"]}


def test_before_a_step_a_plan_names_what_the_model_tells() -> None:
    model = Block()

    plan = capd_client.plan(model, select=["layers.*", "head"], slices={"weight": "first:2"})
    expected = {(one["module"], one["tensor_name"]): one["shapes"] for one in plan.as_dict()["expected"]}
    text = str(plan).splitlines()
    plan.remove()

    assert expected["layers.0", "weight"] == [[2, 8]]
    assert expected["head", "input"] == [["rows", 8]]
    assert expected["head", "grad_output"] == [["rows", 4]]
    assert len(expected) == 3 * 4
    assert text[0] == "12 series would be captured"
    assert ["layers.*", "output", "2", "float32", "[rows,", "8]"] in [line.split() for line in text]
    assert plan.as_dict()["ranks"][0]["series"] == []


def test_a_plan_that_is_only_printed_leaves_the_model_to_the_next_one() -> None:
    model = Block()

    assert str(capd_client.plan(model)).startswith("17 series")
    assert hooks_of(model) == 0
    with capd_client.plan(model, steps="all") as plan:
        train(model)
    assert len(series(plan)) == 17


def test_a_step_gives_shapes_records_and_bytes_also_after_the_plan_has_ended() -> None:
    model = Block()

    with capd_client.plan(model, steps="4-:2") as plan:
        train(model)
    found = series(plan)

    assert found["layers.0", "input"]["shapes"] == [[3, 5, 8]]
    assert (found["layers.0", "input"]["records"], found["layers.0", "input"]["bytes"]) == (
        2,
        2 * 3 * 5 * 8 * 4,
    )
    assert found["layers.0", "weight"]["records"] == 1
    assert found["attention", "query"]["records"] == 2
    assert found["layers.0", "input"]["steps"] == "4-:2"
    [rank] = plan.as_dict()["ranks"]
    assert rank["steps_per_1000"] == 500
    assert rank["bytes_per_1000_steps"] == 500 * rank["bytes"]
    assert "one captured step of rank 0:" in str(plan)


def test_a_plan_changes_no_number_and_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model = Block()
    twin = copy.deepcopy(model)
    before, sdpa = hooks_of(model), functional.scaled_dot_product_attention
    state = torch.get_rng_state()

    with capd_client.plan(model, tensors=("input", "grad_input", "grad_weight")):
        train(model)
        copied = copy.deepcopy(model)
    train(twin)

    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
        for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )
    assert hooks_of(model) == before
    assert functional.scaled_dot_product_attention is sdpa
    assert pickle.dumps(model)
    assert capd_client.counters()["offered"] == 0
    train(copied)


def test_a_plan_beside_watches_leaves_their_steps_alone(sink: MemorySink) -> None:
    model, planned = Block(), Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capd_client.watch(model, select="layers.0")
    plan = capd_client.plan(planned)
    capd_client.watch(model, select="head")

    for _ in range(2):
        train(planned)
        train(model)
        assert sink.context.micro_batch == 1
        optimizer.step()

    assert sink.context.iteration == 1
    assert {c.key.module for c in sink.captured} == {"layers.0", "head"}
    assert [i["iteration"] for i in plan.as_dict()["ranks"][0]["iterations"]] == [0, 1]


def test_modes_are_planned_as_they_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Block()
    monkeypatch.setenv("CAPD_MODE", "stats")
    with capd_client.plan(model, select="head") as plan:
        train(model)
    assert {one["kept"] for one in series(plan).values()} == {"statistics"}
    assert series(plan)["head", "output"]["bytes"] == 2 * 2136

    monkeypatch.setenv("CAPD_MODE", "sample:1/2")
    with capd_client.plan(model, select="head", steps="all") as plan:
        train(model)
    assert {name: one["records"] for (_, name), one in series(plan).items()} == {
        "input": 1, "weight": 1, "output": 1, "grad_output": 1,
    }  # fmt: skip


def test_under_sampling_only_parameters_that_lie_still_are_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPD_MODE", "sample:1/2")
    model = nn.Sequential(nn.Linear(8, 8), parametrizations.weight_norm(nn.Linear(8, 4)))

    with capd_client.plan(model, steps="all") as plan:
        train(model, micro_batches=4)

    assert {names: one["records"] for names, one in series(plan).items() if names[1] in ("weight", "output")} == {
        ("0", "weight"): 1, ("0", "output"): 2, ("1", "weight"): 2, ("1", "output"): 2,
    }  # fmt: skip


def test_several_models_are_planned_as_one_and_what_is_no_model_raises_nothing() -> None:
    chunks = [nn.Linear(4, 4), nn.Linear(4, 2)]

    with capd_client.plan(chunks, name="chunks") as plan, capd_client.plan(3) as nothing:  # type: ignore[arg-type]
        chunks[1](chunks[0](torch.ones(2, 4))).sum().backward()

    assert len(series(plan)) == 8
    assert nothing.as_dict()["ranks"][0]["refused"] == {"internal": 1}


def test_rules_have_steps_and_stores_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "capd.toml").write_text("""
[[rule]]
include = ["layers[.]0"]
tensors = ["input"]
steps = "0-:4"
[[rule]]
include = ["head"]
tensors = ["input"]
store = "stats"
steps = "7"
""")
    monkeypatch.chdir(tmp_path)
    model = Block()

    with capd_client.plan(model) as plan:
        train(model)
    found = series(plan)

    assert {names: (one["kept"], one["steps"], one["records"]) for names, one in found.items()} == {
        ("layers.0", "input"): ("tensor", "0-:4", 2), ("head", "input"): ("statistics", "7", 2),
    }  # fmt: skip
    assert found["layers.0", "input"]["bytes_per_1000_steps"] == 250 * 2 * 3 * 5 * 8 * 4
    assert found["head", "input"]["bytes_in_all"] == 2 * 2136


def test_statistics_in_the_steps_beside_those_of_the_tensor_have_a_rate_of_their_own() -> None:
    model = Block()
    always = {"tensors": "input", "store": "stats", "steps": "all"}
    with capd_client.plan(model, select=[always, {"tensors": "input", "steps": "0-:10"}]) as plan:
        train(model)
    [rank] = plan.as_dict()["ranks"]

    found = [one for one in rank["series"] if one["module"] == "head"]
    assert [(one["kept"], one["steps"], one["records"], one["bytes_per_1000_steps"]) for one in found] == [
        ("tensor", "0-:10", 2, 100 * 2 * 3 * 5 * 8 * 4), ("statistics", "all", 2, 900 * 2 * 2136),
    ]  # fmt: skip
    assert (rank["records"], rank["bytes"]) == (3 * 2, 3 * 2 * 3 * 5 * 8 * 4)  # of a step that keeps all
    assert [one["records"] for one in rank["iterations"]] == [3 * 2]


def test_statistics_in_no_step_but_those_of_the_tensor_are_no_series() -> None:
    model = Block()
    with capd_client.plan(model, select=[{"store": "stats", "steps": "20"}, {"steps": "0-:10"}]) as plan:
        train(model)

    assert {one["kept"] for one in plan.as_dict()["ranks"][0]["series"]} == {"tensor"}


def test_a_disk_that_cannot_be_looked_at_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPD_MAX_DISK", "plenty")
    with capd_client.plan(Block()) as plan:
        train(Block())

    found = plan.as_dict()

    assert ["CAPD_MAX_DISK" in line for line in found["warnings"]] == [True]
    assert "plenty" in str(found["warnings"])


def test_an_error_inside_a_plan_is_counted_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("capd_client.staging.describe.problem_of", broken)
    model = Block()

    with capd_client.plan(model, select="head", tensors=("input", "output")) as plan:
        train(model)

    assert plan.as_dict()["ranks"][0]["refused"] == {"internal": 4}
    assert model.head.weight.grad is not None
