"""The text form of formats, on a command line or in code: "mxfp8", "mxfp8:e5m2:rceil", "nvfp4:16x16:axis=-2"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from capd.errors import ConfigError

if TYPE_CHECKING:
    from capd_client.formats.spec import Spec

__all__ = ["DEFAULT_CHOICES", "DEFAULT_FORMATS", "FormatChoice", "choices"]

DEFAULT_FORMATS = "fp8,mxfp8,mxfp4,nvfp4,hifp8"
_NAMES = ("elem", "block", "axis", "scale_mode", "rounding", "overflow", "tensor_scale", "preset")
_BLOCK = re.compile(r"(\d{1,9})(?:x(\d{1,9}))?")
_AXIS = re.compile(r"-?\d{1,4}")
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """A format to measure. `label` is its name in tables; `fmt` and `options` are arguments of `capd.formats.qdq`."""

    label: str
    fmt: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def spec(self) -> Spec:
        """The format with all options resolved. Imports torch. Raises FormatError for an unknown option."""
        from capd_client.formats.spec import spec_of

        return spec_of(self.fmt, self.options)

    @property
    def axis(self) -> int | None:
        """The dimension of the blocks, None if no blocks share scales."""
        return None if self.spec.block is None else self.spec.axis

    def along(self, axis: int) -> FormatChoice:
        """Return the format with blocks along another axis, unchanged if it has no blocks or a chosen axis."""
        if self.axis is None or self.axis == axis or "axis" in self.options:
            return self
        return replace(self, label=f"{self.label}:axis={axis}", options={**self.options, "axis": axis})


DEFAULT_CHOICES: tuple[FormatChoice, ...] = tuple(
    FormatChoice(word, word) for word in DEFAULT_FORMATS.split(",")
)


def choices(text: str, axes: Sequence[int] = ()) -> tuple[FormatChoice, ...]:
    """Return the formats that `text` names, in its order, each once: "mxfp8,mxfp8:e5m2,nvfp4:16x16,hifp8".

    A format is a name followed by options after colons. An option is an element (e5m2), a scale mode (rceil), an
    overflow rule (saturate), a rounding (away, stochastic), `legacy`, or a block (128, 16x16). Options may also have
    the form name=value, such as axis=-2 or tensor_scale=no. Imports torch.

    Args:
        text: The formats.
        axes: Each format with blocks is taken along each of these axes, unless it names its own axis.

    Raises:
        ConfigError: If a word is unknown. The message names the word and the allowed words.
    """
    from capd_client.formats.spec import FormatError

    found: dict[str, FormatChoice] = {}
    for word in text.split(","):
        try:
            choice = _choice(word.strip())
        except FormatError as error:
            raise ConfigError(f"format {word.strip()!r}: {error}") from error
        for each in [choice.along(axis) for axis in axes] or [choice]:
            found.setdefault(each.label, each)
    return tuple(found.values())


def _choice(text: str) -> FormatChoice:
    from capd_client.formats.spec import FORMATS, spec_of

    fmt, *words = text.split(":")
    if fmt not in FORMATS:
        raise ConfigError(f"unknown format {fmt!r}; known: {', '.join(FORMATS)}")
    options: dict[str, Any] = {}
    for word in words:
        name, value = _option(fmt, word)
        if name in options:
            raise ConfigError(f"format {text!r}: {name} is given twice")
        options[name] = value
    spec_of(fmt, options)
    return FormatChoice(text, fmt, options)


def _option(fmt: str, word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    if equals and name in _NAMES:
        return name, _value(fmt, name, value)
    if _BLOCK.fullmatch(word):
        return "block", _block(word)
    words = _bare_words(fmt)
    for name, allowed in words.items():
        if word in allowed:
            return name, word
    known = ", ".join(dict.fromkeys(chain.from_iterable(words.values())))
    raise ConfigError(f"{fmt} has no option {word!r}; known: {known}, a block (32, 16x16), axis=-2")


def _bare_words(fmt: str) -> Mapping[str, tuple[str, ...]]:
    """Return the words that need no name, by their options. Each word is allowed in one place."""
    from capd_client.formats.spec import FORMATS

    family = FORMATS[fmt]
    return {
        "elem": family.elems,
        "scale_mode": family.scale_modes,
        "overflow": family.overflows,
        "rounding": family.roundings,
        "preset": ("legacy",) if family.has_legacy else (),
    }


def _value(fmt: str, name: str, value: str) -> Any:
    if name == "block":
        # The format refuses an invalid text.
        return _block(value) if _BLOCK.fullmatch(value) else value
    if name == "axis":
        return int(value) if _AXIS.fullmatch(value) else value
    return _TRUTHS.get(value, value) if name == "tensor_scale" else value


def _block(text: str) -> int | tuple[int, int]:
    rows, _, columns = text.partition("x")
    return (int(rows), int(columns)) if columns else int(rows)
