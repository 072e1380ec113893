"""`capd replay` of a run of several ranks: operands put together from all of them, or each rank's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.kit.store.cli import Result, bf16_bits
from tests.kit.store.parts import linear, placed, put_parts

Capd = Callable[..., Result]
RECIPE = "nvfp4,mxfp4"


def _parts(ranks: int, leave_out: tuple[str, int] | None = None) -> list[Any]:
    """A row-parallel layer: input and weight are cut along the contraction of Y."""
    rng = np.random.default_rng(2)
    whole = {
        # The scale of the tensor differs between the halves, and no block of 32 fits into a part.
        "input": rng.normal(size=(24, 48)) * np.linspace(0.1, 30, 48),
        "weight": rng.normal(size=(40, 48)),
        "grad_output": rng.normal(size=(24, 40)) * 1e-4,
    }
    axes = {"input": ("S(-1)", 1), "weight": ("S(1)", 1), "grad_output": ("R", None)}
    found = []
    for name, values in whole.items():
        placement, axis = axes[name]
        pieces = [values] * ranks if axis is None else np.split(values, ranks, axis)
        operation = "backward" if name == "grad_output" else "forward"
        for rank, piece in enumerate(pieces):
            if leave_out != (name, rank):
                key = linear(name, rank, operation=operation, quant_type="bf16")
                more = placed("tp", placement, rank, ranks, batch_dims=[]) if ranks > 1 else {}
                found.append((key, bf16_bits(piece), more))
    return found


def test_the_parts_of_all_ranks_give_what_one_rank_gives(capd: Capd, tmp_path: Path) -> None:
    one = put_parts(tmp_path / "one", _parts(1), iteration=0)
    two = put_parts(tmp_path / "two", _parts(2), iteration=0, sessions={0: 2, 1: 2})
    expected = capd("replay", one, "--recipe", RECIPE, "--json").json
    found = capd("replay", two, "--recipe", RECIPE, "--json").json
    own = capd("replay", two, "--recipe", RECIPE, "--per-rank", "--json").json
    assert (expected["operands"], found["operands"], own["operands"]) == ("rank", "logical", "rank")
    for recipe, product in (
        (recipe, product) for recipe in RECIPE.split(",") for product in ("y", "dx", "dw")
    ):
        numbers = [each["all"][recipe][product] for each in (expected, found, own)]
        assert numbers[0]["sqnr_db"] == numbers[1]["sqnr_db"]
        assert [each["calls"] for each in numbers] == [1, 1, 2]
    # A rank's contraction ends within a block.
    assert own["all"]["nvfp4"]["y"]["sqnr_db"] != found["all"]["nvfp4"]["y"]["sqnr_db"]
    assert "logical operands" in capd("replay", two, "--recipe", RECIPE).out
    assert capd("replay", two, "--recipe", RECIPE, "--rank", "1", "--json").json["operands"] == "rank"


def test_a_missing_part_is_counted(capd: Capd, tmp_path: Path) -> None:
    run = put_parts(tmp_path, _parts(2, ("weight", 1)), iteration=0, sessions={0: 2, 1: 2})
    found = capd("replay", run, "--recipe", "mxfp4", "--json").json
    reason = "weight: parts of it are missing: tp 1 (rank 1 on node node0); --rank takes what one rank has"
    assert found["calls"]["left_out"] == [
        {"reason": f"Y: {reason}", "calls": 1}, {"reason": f"dX: {reason}", "calls": 1},
    ]  # fmt: skip
    assert [*found["all"]["mxfp4"]] == ["dw"]
    alone = capd("replay", run, "--recipe", "mxfp4", "--product", "y")
    assert (alone.code, "parts of it are missing" in alone.err) == (5, True)
