"""What a collection run can be asked for, and what its placeholders become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capd.collect.placeholders import fill, parse_variables, shared_places
from capd.collect.request import CollectionRequest, make_request, parse_duration
from capd.errors import ConfigError


def request(mode: str, quant_type: str | None = None, *numbers: int, **given: Any) -> CollectionRequest:
    given = {"until": None, "stable_for": None, "timeout": None, **given}
    return make_request(mode, quant_type, *(*numbers, None, None)[:2], **given)


def test_defaults_are_tensor_savers() -> None:
    assert request("single") == CollectionRequest("single", ("mxfp8",), 1, 1, "complete", 60.0, 900.0)
    assert request("quick").types == ("mxfp8",)
    assert request("batch").types == ("bf16", "mxfp8", "mxfp4", "hifp8")


def test_what_is_given_is_taken() -> None:
    asked = request("batch", "bf16, my own", 3, 2, until="stable", stable_for="1.5m", timeout="0")

    assert asked == CollectionRequest("batch", ("bf16", "my own"), 3, 2, "stable", 90.0, 0.0)
    assert asked.quota == "3/2"
    assert request("single", None, 0, 4).quota == "all/4"


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: request("twice"), "--mode"),
        (lambda: request("quick", None, 3), "--mode quick"),
        (lambda: request("single", "bf16,mxfp8"), "--mode batch"),
        (lambda: request("batch", "bf16,bf16"), "different"),
        (lambda: request("batch", "bf16,,mxfp8"), "--quant-type"),
        (lambda: request("single", "a\nb"), "printable"),
        (lambda: request("single", "x" * 300), "--quant-type"),
        (lambda: request("single", None, 10**9, 1), "--control-iter"),
        (lambda: request("single", None, 1, 0), "--collect-micro-batches"),
        (lambda: request("single", until="soon"), "--until"),
        (lambda: request("single", timeout="15 minutes"), "--timeout"),
        (lambda: request("single", stable_for="-1s"), "--stable-for"),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(call: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        call()


def test_times_are_read() -> None:
    assert [parse_duration("--timeout", text) for text in ("90", "60s", "15m", "1.5h", " 0 ")] == [
        90,
        60,
        900,
        5400,
        0,
    ]


def test_placeholders_are_replaced_per_type_and_other_braces_stay() -> None:
    found = fill(
        ["train_{quant_type}.sh", "--save={run_dir}/a", "{not_one}", '{"json": {}}'],
        {"PORT": "600{index}"},
        ["data/{quant_type}"],
        quant_type="{index}",  # what a value looks like is not replaced again
        run_dir=Path("/s/r"),
        index=2,
    )

    assert found.command == ("train_{index}.sh", "--save=/s/r/a", "{not_one}", '{"json": {}}')
    assert found.variables == {"PORT": "6002"}
    assert found.required == ("data/{index}",)


def test_a_command_that_is_the_same_for_several_types_is_warned_of() -> None:
    assert "{run_dir}" in (shared_places(["train.sh"], {"A": "{other}"}, 3) or "")
    assert shared_places(["train.sh"], {}, 1) is None
    assert shared_places(["train.sh", "x{index}"], {}, 3) is None
    assert shared_places(["train.sh"], {"SAVE": "{run_dir}"}, 3) is None


def test_variables_are_read() -> None:
    assert parse_variables(["A=1", "B=x=y", "C="]) == {"A": "1", "B": "x=y", "C": ""}
    for text in ("A", "=1", ""):
        with pytest.raises(ConfigError, match="--env"):
            parse_variables([text])
