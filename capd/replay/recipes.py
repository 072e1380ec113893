"""Recipes as a replay uses them: the operands of each product by draw, and the product as the job computes it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from capd.errors import ConfigError
from capd.replay.calls import ReplayCall
from capd.replay.product_sums import OperandPair
from capd_client.config.recipe import NONE, Recipe
from capd_client.emulation.products import Words, linear, words_of
from capd_client.emulation.quantise import has_no_axis, quantise

__all__ = ["OPERANDS_OF", "CallOperands", "ReplayRecipe"]

OPERANDS_OF = {"y": ("x", "w"), "dx": ("g", "w"), "dw": ("g", "x")}
"""The operands of each product, as recipes name them: x the input, w the weight, g the gradient of the output."""


# Their values have at most 8 significant bits, and scales that are powers of two.
_FITS_BFLOAT16 = re.compile('"fmt": "(hifp8|mx)')

_FILES = ".toml"
_MOST_NBYTES = 64 << 10
_MOST_NAME = 64

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
        """Return the recipe of a format's name, of JSON, or of a TOML file with a recipe's mapping (docs/emulation.md).

        Raises:
            ConfigError: There is no such format or file, or the mapping is none of a recipe.
        """
        if name.endswith(_FILES):
            return cls._of_file(Path(name))
        recipe = Recipe.of(name)
        return cls(name, words_of(recipe.linear) or Words())

    @classmethod
    def _of_file(cls, path: Path) -> ReplayRecipe:
        try:
            with open(path, "rb") as file:
                text = file.read(_MOST_NBYTES + 1)
            if len(text) > _MOST_NBYTES:
                raise ConfigError(f"recipe {path}: it has more than {_MOST_NBYTES:,} bytes")
            given = tomllib.loads(text.decode())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"recipe {path}: {getattr(error, 'strerror', None) or error}") from None
        name = given.pop("name", path.stem)
        if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME or not name.isprintable():
            raise ConfigError(f"recipe {path}: name must be a text of at most {_MOST_NAME} characters")
        try:
            recipe = Recipe.of(given)
        except ConfigError as error:
            raise ConfigError(f"recipe {path}: {error}") from None
        return cls(name, words_of(recipe.linear) or Words())

    def is_random(self, product: str) -> bool:
        """Return whether an operand of the product is rounded at random."""
        return any(word.startswith("random ") for word in self._words(product))

    def pair(self, product: str, operands: CallOperands, seed: int) -> OperandPair:
        """Return the operands of a product in float32."""
        a, b = (operands[name] for name in OPERANDS_OF[product])
        of_a, of_b = self._words(product)
        axis_a, axis_b = {"y": (-1, -1), "dx": (-1, 0), "dw": (0, 0)}[product]
        with _seeded(seed):
            one, other = _quantised(a, of_a, axis_a), _quantised(b, of_b, axis_b)
        return _turned(product, OperandPair(one, other, a if of_a else None, b if of_b else None))

    def is_of(self, call: ReplayCall) -> bool:
        """Return whether the job computed this call by the recipe, as its records say."""
        label = call.emulation
        if label is None or label == NONE:
            return self.words == Words()
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

    def _words(self, product: str) -> tuple[str, str]:
        words = self.words
        return {
            "y": (words.a, words.b),
            "dx": (words.gradient, words.backward_b),
            "dw": (words.gradient, words.backward_a),
        }[product]

    @staticmethod
    def plain(product: str, operands: CallOperands) -> tuple[Tensor, Tensor]:
        """Return the captured operands of a product as [rows, n] and [n, columns]."""
        a, b = (operands[name] for name in OPERANDS_OF[product])
        pair = _turned(product, OperandPair(a, b))
        return pair.a, pair.b


def _quantised(values: Tensor, word: str, axis: int) -> Tensor:
    """Return the values of the format in float32, not rounded to the captured dtype."""
    if axis == 0 and word and not has_no_axis(word):
        # A transposed operand needs neither a copy by blocks nor one back, and multiplies as well.
        return _quantised(values.t(), word, -1).t()
    if not word:
        return values.to(torch.float32)
    fits = values.dtype == torch.bfloat16 and _FITS_BFLOAT16.search(word)
    dtype = torch.bfloat16 if fits else torch.float32
    return quantise(values.to(dtype, memory_format=torch.contiguous_format), word, axis).to(torch.float32)


def _turned(product: str, pair: OperandPair) -> OperandPair:
    """Return the operands as [rows, n] and [n, columns]: Y = X Wᵀ, dX = G W, dW = Gᵀ X."""
    if product == "y":
        return pair._replace(b=pair.b.t(), plain_b=None if pair.plain_b is None else pair.plain_b.t())
    if product == "dw":
        return pair._replace(a=pair.a.t(), plain_a=None if pair.plain_a is None else pair.plain_a.t())
    return pair


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        yield
