"""What a site says of its product reaches the records: attributes of tensors, metadata of calls, what it lacks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from capd_client import integrations
from capd_client.hooks.sites import Site
from capd_client.process.log import RateLimitedLog
from capd_client.protocol.kinds import LINEAR
from capd_client.watching import attach
from capd_client.watching.watch import watch
from tests.kit.client.sink import MemorySink


def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"rows": len(args[0])}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    def find(model: nn.Module) -> dict[str, list[Site]]:
        common, of_tensor = (("layout", "sbh"),), (("weight", (("tp_placement", "S(0)"),)),)
        lacks = (("grad_weight", "it is a placeholder"),)
        return {"": [Site(model, LINEAR, ("input",), attributes=common, of_tensor=of_tensor, describe=describe,
                          lacks=lacks)]}  # fmt: skip

    monkeypatch.setattr(integrations, "_FINDERS", (find,))
    monkeypatch.setattr(attach, "_notices", RateLimitedLog())
    return nn.Linear(3, 2)


def test_attributes_are_those_of_the_product_and_of_the_tensor(model: nn.Module, sink: MemorySink) -> None:
    watch(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(4, 3))

    common = {"layout": "sbh", "class": "Linear", "emulation": "none"}
    cast = {**common, "cast_from": "float32"}
    assert {c.key.tensor_name: c.attributes for c in sink.captured} == {
        "input": cast, "weight": {**cast, "tp_placement": "S(0)"}, "output": common,
    }  # fmt: skip


def test_every_record_of_a_call_says_what_the_call_was(model: nn.Module, sink: MemorySink) -> None:
    watch(model, tensors=LINEAR.tensors)
    for rows in (4, 1):
        model(torch.ones(rows, 3, requires_grad=True)).sum().backward()

    told = {(c.key.tensor_name, c.moment.micro_batch): c.metadata for c in sink.captured}
    assert told.pop(("weight", 0)) == '{"rows":4}'
    names = ("input", "output", "grad_output", "grad_input")
    assert told == {(name, mb): f'{{"rows":{rows}}}' for name in names for mb, rows in enumerate((4, 1))}


def test_what_a_product_lacks_is_said_once_and_not_captured(
    model: nn.Module, sink: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="capd_client"):
        watch(model, tensors=("input", "grad_weight"))
    model(torch.ones(4, 3)).sum().backward()

    assert "grad_weight of 1 products is not captured: it is a placeholder" in caplog.text
    assert sink.names() == {"input": 1}
