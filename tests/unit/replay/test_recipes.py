"""Recipes in a replay: which operand takes effect where, and what draws of random rounding average to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from capd.errors import ConfigError
from capd.replay.operands import Taken
from capd.replay.recipes import OPERANDS_OF, ReplayRecipe
from capd.replay.replaying import replay_call
from capd.replay.request import ReplayRequest
from capd.replay.sums import ProductSums

PRODUCTS = tuple(OPERANDS_OF)


def _taken(tokens: int = 96, inputs: int = 64, outputs: int = 80) -> Taken:
    generator = torch.Generator().manual_seed(5)
    shapes = {"x": (tokens, inputs), "w": (outputs, inputs), "g": (tokens, outputs)}
    found = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()
    }
    return Taken(found, None, (tokens,))


def _replayed(recipe: ReplayRecipe, *, draws: int = 1, blame: bool = False) -> dict[str, ProductSums]:
    request = ReplayRequest([recipe], draws=draws, blame=blame)
    return {one: replay_call(_taken(), one, request)[recipe.name] for one in PRODUCTS}


def _recipe(**linear: object) -> ReplayRecipe:
    return ReplayRecipe.of(json.dumps({"linear": linear}))


def test_a_format_quantises_both_operands_along_the_contraction() -> None:
    found = _replayed(ReplayRecipe.of("mxfp4"), blame=True)
    for sums in found.values():
        assert sums.blame is not None
        shares = [part["energy"] or 0.0 for part in sums.blame.shares().values()]
        assert shares[0] == pytest.approx(0.5, abs=0.1)
        assert shares[1] == pytest.approx(0.5, abs=0.1)


def test_a_backward_that_is_not_quantised_is_exact() -> None:
    found = _replayed(_recipe(format="mxfp4", backward="none"))
    assert found["y"].sqnr_db is not None
    assert found["y"].sqnr_db < 20
    assert found["dx"].noise == found["dw"].noise == 0


def test_an_unbiased_rounding_gains_ten_log_of_its_draws() -> None:
    """NVFP4 clips nothing, because the largest value of a block is on its grid's end; both operands are random."""
    found = _replayed(_recipe(format="nvfp4", rounding="stochastic"), draws=16)
    for sums in found.values():
        assert sums.is_random
        assert sums.draws is not None
        assert sums.draws.gain_db == pytest.approx(sums.draws.ideal_db, abs=0.7)


def test_a_deterministic_operand_stays_in_the_mean_of_draws() -> None:
    """dY alone is rounded at random: the error of X and W stays, and Y has no draws."""
    found = _replayed(_recipe(format="nvfp4", gradient_rounding="stochastic"), draws=16)
    assert found["y"].draws is None
    assert not found["y"].is_random
    for name in ("dx", "dw"):
        draws = found[name].draws
        assert draws is not None
        assert draws.gain_db is not None
        assert 1 < draws.gain_db < draws.ideal_db - 4


def test_a_file_has_the_mapping_of_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "blocks.toml"
    path.write_text(
        '[linear]\nformat = "fp8"\nblock = 128\nweight = {format = "fp8", block = [128, 128]}\nbackward = "none"\n'
    )
    found = ReplayRecipe.of(str(path))
    asked = {
        "format": "fp8",
        "block": 128,
        "weight": {"format": "fp8", "block": [128, 128]},
        "backward": "none",
    }
    assert found.name == "blocks"
    assert found.words == _recipe(**asked).words
    path.write_text('name = "mine"\nlinear = "mxfp8"\n')
    assert ReplayRecipe.of(str(path)) == replace(ReplayRecipe.of("mxfp8"), name="mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("linear = ", "Invalid value"),
        ("linear = 'mxfp5'", "mxfp5"),
        ("wgrad = 'mxfp8'", "wgrad"),
        ("name = 3", "name must be a text"),
        ("a = " + "1" * (64 << 10), "more than 65,536 bytes"),
        ("\u00ff".encode("latin-1"), "decode"),
        (None, "No such file"),
    ],
)
def test_a_bad_file_is_refused_by_its_name(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    path = tmp_path / "bad.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message) as refused:
        ReplayRecipe.of(str(path))
    assert str(path) in str(refused.value)


def test_a_draw_is_the_same_for_the_same_seed() -> None:
    recipe = _recipe(format="nvfp4", rounding="stochastic")

    def pair(seed: int) -> tuple[Tensor, Tensor]:
        found = recipe.pair("dw", _taken().operands, seed)
        return found.a, found.b

    state = torch.get_rng_state()
    assert all(map(torch.equal, pair(3), pair(3)))
    assert not all(map(torch.equal, pair(3), pair(4)))
    assert torch.equal(torch.get_rng_state(), state)
