"""Recipes in a replay: which operand takes effect where, and what draws of random rounding average to."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from capd.errors import ConfigError
from capd.replay.operands import Taken
from capd.replay.recipes import OPERANDS_OF, ReplayRecipe
from capd.replay.replaying import replay_product
from capd.replay.request import ReplayRequest
from capd.replay.sums import ProductSums
from capd_client.emulation.recipe_products import quantised_operands
from capd_client.emulation.words import Words, words_of
from capd_client.recipes.parse import parse_recipe
from capd_client.recipes.presets import PRESETS

PRODUCTS = tuple(OPERANDS_OF)


def _taken(tokens: int = 96, inputs: int = 64, outputs: int = 80) -> Taken:
    generator = torch.Generator().manual_seed(5)
    shapes = {"x": (tokens, inputs), "w": (outputs, inputs), "g": (tokens, outputs)}
    found = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()
    }
    return Taken(found, None, (tokens,))


def _wide() -> Taken:
    """Operands whose sides any transform divides."""
    return _taken(256, 128, 384)


def _by_products(**products: object) -> ReplayRecipe:
    recipe = parse_recipe(products, "own")
    return ReplayRecipe(recipe.name, words_of(recipe) or Words())


def _replayed(
    recipe: ReplayRecipe, *, draws: int = 1, blame: bool = False, taken: Taken | None = None
) -> dict[str, ProductSums]:
    taken = _taken() if taken is None else taken
    request = ReplayRequest([recipe], draws=draws, blame=blame)
    return {one: replay_product(taken, one, [recipe], request)[recipe.name] for one in PRODUCTS}


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


def test_a_file_is_named_by_itself_or_in_itself(tmp_path: Path) -> None:
    path = tmp_path / "blocks.toml"
    path.write_text('[recipe.fprop]\nx = {format = "fp8", block = 128}\n')
    assert ReplayRecipe.of(str(path)).name == "blocks"
    path.write_text('[recipe]\nname = "mine"\n[recipe.fprop]\nx = {format = "fp8", block = 128}\n')
    found = ReplayRecipe.of(str(path))
    assert found.name == "mine"
    sums = _replayed(found)
    assert sums["dx"].sqnr_db == sums["dw"].sqnr_db == math.inf


def test_an_unknown_recipe_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    for name in ("nvfp5", str(tmp_path / "no.toml")):
        with pytest.raises(ConfigError, match=r"no\.toml|nvfp4-te, mxfp4-rht-sr"):
            ReplayRecipe.of(name)


@pytest.mark.parametrize("name", [*PRESETS, "mxfp8", "hif4"])
def test_operands_are_those_of_the_emulation(name: str) -> None:
    """To the bit where nothing is drawn, in float32."""
    recipe, operands = ReplayRecipe.of(name), {key: one.float() for key, one in _wide().operands.items()}
    compared = 0
    for product in PRODUCTS:
        if not recipe.is_random(product):
            a, b = quantised_operands(product, operands, recipe.words).quantised
            pair = recipe.pair(product, operands, 0)
            assert torch.equal(pair.a(slice(None)), a.t() if product == "dw" else a)
            assert torch.equal(pair.b, b.t() if product == "y" else b)
            compared += 1
    assert compared or name == "mxfp4-rht-sr"


@pytest.mark.parametrize("name", [*PRESETS])
def test_random_products_are_as_far_off_as_those_of_the_emulation(name: str) -> None:
    """The draws differ. An error of other energy would show another format, source, transform or mask."""
    recipe, taken = ReplayRecipe.of(name), _wide()
    operands = {key: one.float() for key, one in taken.operands.items()}
    x, w = (operands[key].requires_grad_() for key in ("x", "w"))
    torch.manual_seed(1)
    y = recipe.linear(x, w)
    gradients = torch.autograd.grad(y, (x, w), operands["g"])
    found = dict(zip(PRODUCTS, (y.detach(), *gradients), strict=True))
    operands = {key: one.detach() for key, one in operands.items()}
    sums = _replayed(recipe, taken=taken, draws=4)
    for product in PRODUCTS:
        a, b = (one.double() for one in ReplayRecipe.plain(product, operands))
        exact = a @ b
        noise = (found[product].double() - exact).square().sum() / exact.square().sum()
        zeta = sums[product].zeta
        assert zeta is not None
        assert zeta == pytest.approx(math.sqrt(float(noise)), rel=0.05, abs=1e-6)


def test_a_transform_alone_changes_nothing() -> None:
    turn = {"kind": "hadamard", "size": 32, "signs": "seeded"}
    found = _replayed(_by_products(fprop={"transform": turn}, dgrad={"transform": turn}), taken=_wide())
    assert all(found[name].zeta < 1e-6 for name in PRODUCTS)


@pytest.mark.parametrize(
    ("product", "use", "operand"), [("y", "fprop", "w"), ("dx", "dgrad", "g"), ("dw", "wgrad", "x")]
)
def test_one_use_takes_effect_alone_and_has_all_the_blame(product: str, use: str, operand: str) -> None:
    turn = {"kind": "hadamard", "size": 16, "signs": "te"}
    recipe = _by_products(**{use: {operand: {"format": "mxfp4"}, "transform": turn}})
    found = _replayed(recipe, taken=_wide(), blame=True)
    assert {name for name in PRODUCTS if found[name].noise} == {product}
    names = (*OPERANDS_OF[product], "cross", "mask")
    assert found[product].blame is not None
    for name, shares in zip(names, found[product].blame.shares().values(), strict=True):
        assert shares["inner"] == pytest.approx(float(name == operand), abs=1e-3)


def test_a_requantised_operand_is_blamed_for_both_of_its_quantisers() -> None:
    again = {"format": "mxfp4", "source": "requantised"}
    recipe = _by_products(fprop={"w": {"format": "mxfp4"}, "x": {"format": "mxfp8"}}, dgrad={"w": again})
    found = _replayed(recipe, taken=_wide(), blame=True)["dx"]
    assert found.blame is not None
    assert found.blame.shares()["b"] == {"energy": 1.0, "inner": 1.0}
    once = _replayed(_by_products(dgrad={"w": {"format": "mxfp4"}}), taken=_wide())["dx"]
    assert found.zeta is not None
    assert once.zeta is not None
    assert found.zeta > 1.01 * once.zeta


def test_the_mask_of_a_recipe_has_a_share_of_its_own() -> None:
    found = _replayed(ReplayRecipe.of("quartet"), taken=_wide(), blame=True)
    for name in ("dx", "dw"):
        blame = found[name].blame
        assert blame is not None
        shares = {part: each["inner"] or 0.0 for part, each in blame.shares().items()}
        assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
        assert 0 < shares["mask"] < 0.5


def test_the_shrunken_random_rounding_clips_nothing_and_is_unbiased() -> None:
    found = _replayed(ReplayRecipe.of("mxfp4-rht-sr"), taken=_wide(), draws=16)
    for name in ("dx", "dw"):
        draws = found[name].draws
        assert draws is not None
        assert draws.gain_db == pytest.approx(draws.ideal_db, abs=0.5)


def test_a_draw_is_the_same_for_the_same_seed() -> None:
    recipe = _recipe(format="nvfp4", rounding="stochastic")

    def pair(seed: int) -> tuple[Tensor, Tensor]:
        found = recipe.pair("dw", _taken().operands, seed)
        return found.a(slice(None)), found.b

    state = torch.get_rng_state()
    assert all(map(torch.equal, pair(3), pair(3)))
    assert not all(map(torch.equal, pair(3), pair(4)))
    assert torch.equal(torch.get_rng_state(), state)
