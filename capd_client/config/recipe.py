"""The recipe of an emulation: a number format for linears, and one for each product of attention. No torch.

    Recipe.of("mxfp8")                                    # the word applies to all three
    Recipe.of({"linear": "mxfp8", "qk": "none", "pv": "none"})
    Recipe.of({"linear": {"format": "mxfp4", "backward": {"format": "mxfp8", "elem": "e5m2"}}})
    Recipe.of("nvfp4-te")                                 # a preset of linear layers, or the path of a recipe's file
    Recipe.of(recipe.text())                              # its own JSON

A part that a mapping does not name is not emulated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Optional, Union

from capd_client.errors import ConfigError
from capd_client.formats.spec import FORMATS, Block, FormatError, spec_of
from capd_client.protocol.selection import check_globs
from capd_client.recipes.find import is_recipe_file, preset, recipe_of_file
from capd_client.recipes.linear_recipe import LinearRecipe
from capd_client.recipes.parse import is_linear_recipe, parse_recipe
from capd_client.recipes.presets import PRESETS

__all__ = ["BASELINES", "LEVELS", "NONE", "PARTS", "QuantSpec", "Recipe", "Words"]

Words = Union[str, Mapping[str, Any], "Recipe"]

NONE = "none"
BASELINES = (NONE, "bf16", "fp16", "fp32")
"""The words of runs without emulation. They install nothing."""

PARTS = ("linear", "qk", "pv")
LEVELS = ("straight-through", "exact")

_OPTIONS = ("elem", "block", "scale_mode", "rounding", "overflow", "tensor_scale", "preset")
_ABOUT_BACKWARD = ("backward", "gradient_rounding", "weight")
_OF_RECIPE = (*PARTS, "level", "backward", "include", "exclude")
_MAX_CHARS = 16_384


@dataclass(frozen=True)
class QuantSpec:
    """A number format with its options settled, and the treatment of the backward of its products.

    Attributes:
        format, elem, block, scale_mode, rounding, overflow, tensor_scale, preset: As in `capd_client.formats.encode`;
            None if the format does not take the option. Blocks run along the contraction axis of each product, so there
            is no axis.
        backward: "same" quantises the operands of the two products of the backward as those of the forward. "none"
            computes these products from unquantised operands, and gradients pass straight through. A QuantSpec
            quantises the operands by another format.
        gradient_rounding: The rounding of dY alone, instead of its format's; usually "stochastic".
        weight: The format of a linear's weight in the forward, and in dX = dY · W if `backward` is "same". None is the
            format of the input.
    """

    format: str
    elem: Optional[str] = None
    block: Block = None
    scale_mode: Optional[str] = None
    rounding: Optional[str] = None
    overflow: Optional[str] = None
    tensor_scale: Optional[bool] = None
    preset: Optional[str] = None
    backward: Union[str, QuantSpec] = "same"
    gradient_rounding: Optional[str] = None
    weight: Optional[QuantSpec] = None

    @classmethod
    def of(cls, given: Union[str, Mapping[str, Any]], where: str = "format") -> Optional[QuantSpec]:
        """Return the format that a word or a mapping names; None for a word of BASELINES.

        Raises:
            ConfigError: The format or an option is invalid. The message names `where`.
        """
        if isinstance(given, str) and given in BASELINES:
            return None
        found = _mapping(given, where)
        return None if found.get("format") == NONE else _settled(found, where)

    @property
    def for_weight(self) -> QuantSpec:
        """The format of a linear's weight in the forward."""
        return self.weight or self

    @property
    def backward_spec(self) -> Optional[QuantSpec]:
        """The format of the operands of the backward; None if they are not quantised."""
        if isinstance(self.backward, QuantSpec):
            return self.backward
        return self if self.backward == "same" else None

    @property
    def backward_weight(self) -> Optional[QuantSpec]:
        """The format of a linear's weight in the backward; None if it is not quantised."""
        if self.backward == "same":
            return self.for_weight
        spec = self.backward_spec
        return None if spec is None else spec.for_weight

    @property
    def gradient_spec(self) -> Optional[QuantSpec]:
        """The format of dY; None if it is not quantised."""
        spec, rounding = self.backward_spec, self.gradient_rounding
        return spec if spec is None or rounding is None else replace(spec, rounding=rounding)

    def options(self) -> dict[str, Any]:
        """Return the options that the format takes."""
        found = {name: getattr(self, name) for name in _OPTIONS}
        return {name: value for name, value in found.items() if value is not None}

    def as_mapping(self) -> dict[str, Any]:
        """Return JSON values that `of` reads back."""
        backward = self.backward._plain() if isinstance(self.backward, QuantSpec) else self.backward
        found = {**self._plain(), "backward": backward}
        if self.gradient_rounding is not None:
            found["gradient_rounding"] = self.gradient_rounding
        return found

    def _plain(self) -> dict[str, Any]:
        """Return the JSON values of a format within a format."""
        weight = {} if self.weight is None else {"weight": self.weight._plain()}
        return {"format": self.format, **self.options(), **weight}


@dataclass(frozen=True)
class Recipe:
    """The formats of the three kinds of products; None for a kind that is not quantised.

    Attributes:
        linear: The format of Y = X · Wᵀ, or a recipe of its three products.
        qk: The format of the scores S = Q · Kᵀ of attention.
        pv: The format of the output O = P · V of attention.
        level: How attention is emulated. "straight-through": the fused kernel gets quantised q, k and v, and gradients
            pass the quantisers unchanged. "exact": attention is unfused, and P and the backward are quantised too.
        include, exclude: Globs over module names, without the parts that wrappers add. An empty `include` is all.
    """

    linear: Union[QuantSpec, LinearRecipe, None] = None
    qk: Optional[QuantSpec] = None
    pv: Optional[QuantSpec] = None
    level: str = LEVELS[0]
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Words) -> Recipe:
        """Return the recipe of a word, a mapping, JSON text or a recipe. Raises ConfigError if it is invalid."""
        if isinstance(given, Recipe):
            return given
        if isinstance(given, str):
            text = given.strip()
            given = _read(text) if text.startswith("{") else _of_word(text)
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"a recipe cannot be {given!r}; it is a format's name, a mapping, or that in JSON"
            )
        if "format" in given:
            raise ConfigError(f"a recipe names its parts ({', '.join(PARTS)}), each with a format of its own")
        _check_names("the recipe", given, _OF_RECIPE)
        specs: dict[str, Any] = {part: _part_of(given, part) for part in PARTS}
        level = given.get("level", LEVELS[0])
        if level not in LEVELS:
            raise ConfigError(f"level cannot be {level!r}; allowed are {', '.join(LEVELS)}")
        include, exclude = (_globs(name, given.get(name)) for name in ("include", "exclude"))
        return cls(**specs, level=level, include=include, exclude=exclude)

    @property
    def is_none(self) -> bool:
        """Whether nothing is emulated."""
        return not self.parts

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the emulated parts."""
        return tuple(part for part in PARTS if getattr(self, part) is not None)

    def within(self, include: Optional[Iterable[str]], exclude: Optional[Iterable[str]]) -> Recipe:
        """Return the same recipe for other modules; None keeps the recipe's own globs."""
        return replace(
            self,
            include=self.include if include is None else _globs("include", include),
            exclude=self.exclude if exclude is None else _globs("exclude", exclude),
        )

    def text(self) -> str:
        """Return "none", or canonical JSON with every settled option, which `of` reads back."""
        if self.is_none:
            return NONE
        found: dict[str, Any] = {}
        for part in PARTS:
            spec = getattr(self, part)
            found[part] = NONE if spec is None else spec.as_mapping()
        if self.qk or self.pv:
            found["level"] = self.level
        for name in ("include", "exclude"):
            if getattr(self, name):
                found[name] = list(getattr(self, name))
        return json.dumps(found, sort_keys=True, separators=(",", ":"))


def _read(text: str) -> Any:
    if len(text) > _MAX_CHARS:
        raise ConfigError(f"a recipe has at most {_MAX_CHARS} characters, not {len(text)}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the recipe is no JSON: {error}") from None


def _of_word(text: str) -> Mapping[str, Any]:
    """Return the parts of a word: a recipe of linear layers alone, or a format of all products."""
    if is_recipe_file(text):
        # Only a text that is all of a recipe names a file: a store's labels are recipes, too, and name none.
        return {"linear": recipe_of_file(text)}
    if text in PRESETS:
        return {"linear": text}
    return dict.fromkeys(PARTS, text)


def _part_of(given: Mapping[str, Any], part: str) -> Union[QuantSpec, LinearRecipe, None]:
    own = given.get(part)
    if isinstance(own, str) and own in PRESETS:
        found = preset(own)
    elif isinstance(own, LinearRecipe):
        found = own
    elif isinstance(own, Mapping) and is_linear_recipe(own):
        found = parse_recipe(own)
    else:
        spec = QuantSpec.of(_with_default(given, part), part)
        _check_part(part, spec)
        return spec
    if part != "linear":
        raise ConfigError(f"{part}: a recipe by products is of linear alone; give {part} a format or none")
    return found


def _with_default(given: Mapping[str, Any], part: str) -> Any:
    """Return a part of the recipe, with the recipe's common backward as its default."""
    spec = given.get(part, NONE)
    default = given.get("backward")
    if default is None or spec in BASELINES:
        return spec
    if isinstance(spec, str):
        spec = {"format": spec}
    return {"backward": default, **spec} if isinstance(spec, Mapping) else spec


def _settled(given: dict[str, Any], where: str) -> QuantSpec:
    _check_names(where, given, ("format", *_OPTIONS, *_ABOUT_BACKWARD))
    fmt = given.get("format")
    if not isinstance(fmt, str) or fmt not in FORMATS:
        # "none" is no format within a format; `_inner` requires one.
        none = () if where.endswith((".weight", ".backward")) else (NONE,)
        allowed = ", ".join((*none, *FORMATS))
        raise ConfigError(f"{where}: the format cannot be {fmt!r}; allowed are {allowed}")
    options = {name: given[name] for name in _OPTIONS if given.get(name) is not None}
    try:
        spec = spec_of(fmt, options)
    except FormatError as error:
        raise ConfigError(f"{where}: {error}") from None
    weight = given.get("weight")
    found = QuantSpec(
        fmt, spec.elem, spec.block, spec.scale_mode, spec.rounding, spec.overflow,
        spec.tensor_scale if FORMATS[fmt].has_tensor_scale else None, options.get("preset"),
        _backward(given.get("backward"), where), given.get("gradient_rounding"),
        None if weight is None else _inner(weight, f"{where}.weight"),
    )  # fmt: skip
    _check_gradient(found, where)
    return found


def _check_part(part: str, spec: Optional[QuantSpec]) -> None:
    if part == "linear" or spec is None:
        return
    if spec.weight is not None or (isinstance(spec.backward, QuantSpec) and spec.backward.weight is not None):
        raise ConfigError(f"{part}: only linear can have a weight")


def _check_gradient(spec: QuantSpec, where: str) -> None:
    if spec.gradient_rounding is None:
        return
    gradient = spec.gradient_spec
    if gradient is None:
        raise ConfigError(f"{where}: gradient_rounding has no effect if backward is none")
    try:
        spec_of(gradient.format, gradient.options())
    except FormatError as error:
        raise ConfigError(f"{where}.gradient_rounding: {error}") from None


def _backward(given: Any, where: str) -> Union[str, QuantSpec]:
    if given is None or given == "same":
        return "same"
    if given == NONE:
        return NONE
    if isinstance(given, str) and given not in FORMATS:
        raise ConfigError(
            f"{where}.backward cannot be {given!r}; allowed are none, same, {', '.join(FORMATS)}"
        )
    return _inner(given, f"{where}.backward")


def _inner(given: Any, where: str) -> QuantSpec:
    """Parse a format within another one. It has no backward of its own, and can be bf16 or fp16."""
    found = _mapping(given, where)
    if found.get("backward", "same") != "same" or found.get("gradient_rounding") is not None:
        raise ConfigError(f"{where}: the format within a format has no backward of its own")
    return _settled(found, where)


def _mapping(given: Any, where: str) -> dict[str, Any]:
    if isinstance(given, str):
        return {"format": given}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{where} cannot be {given!r}; it is a format's name or a mapping with a format and its options"
        )
    return dict(given)


def _check_names(where: str, given: Mapping[str, Any], allowed: Iterable[str]) -> None:
    unknown = [name for name in given if name not in allowed]
    if unknown:
        raise ConfigError(f"{where} has no {str(unknown[0])[:64]!r}; it has {', '.join(allowed)}")


def _globs(name: str, given: Any) -> tuple[str, ...]:
    if not given:
        return ()
    globs = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(glob, str) for glob in globs):
        raise ConfigError(f"{name} cannot be {given!r}; it is a glob over module names, or several")
    try:
        check_globs(globs)
    except ConfigError as error:
        raise ConfigError(str(error).replace("modules:", f"{name}:", 1)) from None
    return globs
