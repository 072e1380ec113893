"""Recipes as a replay uses them: the operands of each product by draw, and the product as the job computes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from capd.errors import ConfigError
from capd.products.captured.calls import ProductCall
from capd.replay.exact_product import After
from capd.replay.operand_rows import PlainRows, QuantisedRows, slabs
from capd.replay.product_sums import OperandPair
from capd_client.config.recipe import BASELINES, NONE, Recipe
from capd_client.emulation.products import linear
from capd_client.emulation.quantise import is_random
from capd_client.emulation.recipe_products import OPERANDS_OF, after_product
from capd_client.emulation.words import Words, words_of
from capd_client.formats.spec import FORMATS
from capd_client.recipes.find import is_recipe_file
from capd_client.recipes.linear_recipe import LinearRecipe
from capd_client.recipes.presets import PRESETS

__all__ = ["OPERANDS_OF", "CallOperands", "ReplayRecipe"]

# bfloat16 holds the values of HiF8, so that its quantiser takes bfloat16 as it was captured.
_BY_TABLE = re.compile('"fmt": "hifp8"')

CallOperands = Mapping[str, Tensor]
"""Operands of one call of a linear layer in the captured dtype: x [tokens, in_features], w [out_features, in_features]
and g [tokens, out_features], the gradient of the output."""


@dataclass(frozen=True, slots=True)
class ReplayRecipe:
    """A recipe.

    Attributes:
        name: The name in the output.
        words: The formats of its operands.
    """

    name: str
    words: Words

    @classmethod
    def of(cls, name: str) -> ReplayRecipe:
        """Return the recipe of a preset's or a format's name, of JSON, or of a TOML file (docs/recipes.md).

        Raises:
            ConfigError: There is no such recipe, or it cannot be.
        """
        known = ("none", *PRESETS, *FORMATS)
        if not (name in (*known, *BASELINES) or is_recipe_file(name) or name.startswith("{")):
            raise ConfigError(f"--recipe: {name!r} is no recipe; use {', '.join(known)} or FILE.toml")
        own = Recipe.of(name).linear
        return cls(own.name if isinstance(own, LinearRecipe) else name, words_of(own) or Words())

    def is_random(self, product: str) -> bool:
        """Return whether draws of the product differ."""
        of_a, of_b, turn = self._words(product)
        words = self.words
        again = (words.a if OPERANDS_OF[product][1] == "x" else words.b) if self._is_again(product) else ""
        return any(map(is_random, (of_a, of_b, turn, again)))

    def pair(
        self, product: str, operands: CallOperands, seed: int, *, with_plain: bool = False
    ) -> OperandPair:
        """Return the operands of a product in float32, those of `quantised_operands` but for what is random.

        Operands are turned so that they are quantised along their last axis. This saves copies, and multiplies as well.

        Args:
            product: "y", "dx" or "dw".
            operands: The operands.
            seed: The seed of the draw.
            with_plain: Whether the operands before their quantisers are needed, too.
        """
        of_a, of_b, turn = self._words(product)
        first, second = (operands[name] for name in OPERANDS_OF[product])
        forward = self._forward(product, second, seed)
        touched = bool(of_a or turn), bool(of_b or turn or forward is not None)
        signs = _seed(seed, 3)
        again = second if forward is None else forward
        again = again if product == "y" else again.t()
        # The second operand is made first, when nothing else of the product is in memory.
        plain = PlainRows(again, turn, signs, takes_bfloat16=_has_table(of_b))
        found_b = QuantisedRows(plain, of_b, _seed(seed, 2))(slice(None))
        del plain, again, forward
        plain_b = None
        if with_plain and touched[1]:
            before = self.words.transform if self.words.mask and product != "y" else ""
            unquantised = second if product == "y" else second.t()
            plain_b = PlainRows(unquantised, turn, signs, before=before).whole().t()
        plain = PlainRows(
            first.t() if product == "dw" else first, turn, signs, takes_bfloat16=_has_table(of_a)
        )
        return OperandPair(
            QuantisedRows(plain, of_a, _seed(seed, 1)),
            found_b.t(),
            plain if with_plain and touched[0] else None,
            plain_b,
            after=self._after(product, operands),
            is_exact=not any(touched) and not self.words.mask,
        )

    def _forward(self, product: str, operand: Tensor, seed: int) -> Tensor | None:
        """Return x or w as the backward starts with it, None if that is what was captured."""
        words = self.words
        if product == "y" or not (words.mask or self._is_again(product)):
            return None
        plain = PlainRows(operand, words.transform if words.mask else "", 0)
        if not self._is_again(product):
            return plain.whole()
        word = words.a if OPERANDS_OF[product][1] == "x" else words.b
        return QuantisedRows(plain, word, _seed(seed, 0))(slice(None))

    def _after(self, product: str, operands: CallOperands) -> After | None:
        """Return the mask and the inverse transform of a block of rows of dX or dW."""
        if not self.words.mask or product == "y":
            return None
        masked = PlainRows(operands["x" if product == "dx" else "w"], "", 0)

        def after(rows: slice, values: Tensor) -> Tensor:
            for some in slabs(0, *values.shape):
                operand = masked(slice(rows.start + some.start, rows.start + some.stop))
                values[some] = after_product(product, values[some], operand, self.words)
            return values

        return after

    def needs(self, product: str) -> frozenset[str]:
        """Return the names of the captured tensors that the product needs."""
        masks = {"dx": "x", "dw": "w"} if self.words.mask else {}
        return frozenset((*OPERANDS_OF[product], *filter(None, [masks.get(product)])))

    def is_of(self, call: ProductCall) -> bool:
        """Return whether the job computed this call by the recipe, as its records say."""
        label = call.emulation
        if label is None or label == NONE:
            return self.words == Words()
        # A store's label never names a file to read.
        if is_recipe_file(label):
            return False
        try:
            recipe = Recipe.of(label)
        except ConfigError:
            # A later capd may know more recipes.
            return False
        module = str(call.place["module"])
        is_chosen = not recipe.include or any(fnmatchcase(module, glob) for glob in recipe.include)
        if not is_chosen or any(fnmatchcase(module, glob) for glob in recipe.exclude):
            return self.words == Words()
        return (words_of(recipe.linear) or Words()) == self.words

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        """Compute Y as a model that is emulated does, with gradients: x [..., in_features]."""
        return torch.nn.functional.linear(x, w) if self.words == Words() else linear(x, w, None, self.words)

    @staticmethod
    def plain(product: str, operands: CallOperands) -> tuple[Tensor, Tensor]:
        """Return the captured operands of a product as [rows, n] and [n, columns]."""
        a, b = (operands[name] for name in OPERANDS_OF[product])
        return a.t() if product == "dw" else a, b.t() if product == "y" else b

    def _is_again(self, product: str) -> bool:
        return product != "y" and OPERANDS_OF[product][1] in self.words.requantised

    def _words(self, product: str) -> tuple[str, str, str]:
        """Return the words of both operands, and of the transform."""
        words = self.words
        return {
            "y": (words.a, words.b, words.transform),
            "dx": (words.gradient, words.backward_b, words.dgrad_transform),
            "dw": (words.gradient_of_weight, words.backward_a, words.wgrad_transform),
        }[product]


def _has_table(word: str) -> bool:
    """Return whether values of 16 bits are quantised by a table."""
    return bool(_BY_TABLE.search(word))


def _seed(seed: int, use: int) -> int:
    """Return a seed of its own for each use of a draw, so that no two draws have the same random bits."""
    return 4 * seed + use
