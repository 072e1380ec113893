"""Converters of the client's settings: each takes text or a TOML value and returns the typed one.

All raise ConfigError that says what is accepted.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Optional, TypeVar

from capd_client.config.file import read_rules_file
from capd_client.config.sizes import parse_size
from capd_client.errors import ConfigError
from capd_client.formats.spec import FORMATS
from capd_client.protocol.quota import parse_quota
from capd_client.protocol.selection import Ranges
from capd_client.rules.schema import RuleSettings, parse_rules, rule_of_globs
from capd_client.rules.slices import Slice

__all__ = [
    "FALSE", "TRUE", "emulation", "flag", "integer", "log_level", "mode", "number", "one_of", "quota", "ranges",
    "rules", "sample_every", "size", "size_in", "slice_text", "store_root", "text", "watch",
]  # fmt: skip

_Number = TypeVar("_Number", int, float)
TRUE, FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
_MAX_SAMPLE_EVERY = 10**9
_SAMPLE = re.compile(r"sample:1/([1-9][0-9]{0,9})")


def number(low: float, high: float) -> Callable[[Any], float]:
    """Return a converter to a finite number, within bounds."""
    return _within(_number, low, high)


def integer(low: int, high: int) -> Callable[[Any], int]:
    """Return a converter to a whole number, within bounds."""
    return _within(_integer, low, high)


def size(low: int, high: int) -> Callable[[Any], int]:
    """Return a converter to bytes, within bounds."""
    return _within(_size, low, high, " bytes")


def _within(
    read: Callable[[Any], _Number], low: _Number, high: _Number, unit: str = ""
) -> Callable[[Any], _Number]:
    def convert(value: Any) -> _Number:
        result = read(value)
        # NaN is not within bounds.
        if not low <= result <= high:
            raise ConfigError(f"{value!r} is not between {low} and {high}{unit}")
        return result

    return convert


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{value!r} is not a number") from None


def _integer(value: Any) -> int:
    try:
        return int(str(value), 10)
    except ValueError:
        raise ConfigError(f"{value!r} is not a whole number") from None


def _size(value: Any) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def size_in(unit: str, low: float, high: float) -> Callable[[Any], float]:
    """Return a converter to a number of `unit` ("MB"), within bounds; text may name another unit."""
    within, nbytes = number(low, high), parse_size(f"1{unit}")

    def convert(value: Any) -> float:
        if isinstance(value, str) and value.strip()[-1:].isalpha():
            return within(size(0, 1 << 63)(value) / nbytes)
        try:
            return within(value)
        except ConfigError as error:
            raise ConfigError(
                f"{error} {unit}; write a number of {unit}, or one with its unit: 1.5GB"
            ) from None

    return convert


def flag(value: Any) -> bool:
    """Convert 1/true/yes/on and 0/false/no/off."""
    word = str(value).strip().lower()
    if word not in TRUE | FALSE:
        raise ConfigError(f"{value!r} is neither 1 nor 0")
    return word in TRUE


def ranges(value: Any) -> str:
    """Check ranges; return their text."""
    return Ranges(str(value)).text


def rules(value: Any) -> tuple[RuleSettings, ...]:
    """Convert rules: a file of rules (text that ends in .toml, or a path), globs over module names, or mappings.

    Text that names no file holds globs, separated by commas.
    """
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value.strip().endswith(".toml")):
        return read_rules_file(os.fsdecode(value).strip())
    if isinstance(value, str):
        return (rule_of_globs(glob.strip() for glob in value.split(",")),)
    if isinstance(value, Mapping):
        return parse_rules([value])
    items = list(value) if isinstance(value, Iterable) else [value]
    if items and all(isinstance(item, RuleSettings) for item in items):
        # These rules come from capd.toml and are checked.
        return tuple(items)
    if items and all(isinstance(item, str) for item in items):
        return (rule_of_globs(items),)
    if not items or not all(isinstance(item, Mapping) for item in items):
        raise ConfigError(
            "a selection is a glob, several globs, a rule, several rules, or the path of a .toml file"
        )
    return parse_rules(items)


def one_of(supported: tuple[str, ...]) -> Callable[[Any], str]:
    """Return a converter to one of the `supported` words, in lower case."""

    def convert(value: Any) -> str:
        word = str(value).strip().lower()
        if word in supported:
            return word
        raise ConfigError(f"{value!r} is not supported; supported: {', '.join(supported)}")

    return convert


def watch(value: Any) -> str:
    """Convert auto and yes to "auto", off and no to "off"."""
    word = str(value).strip().lower()
    if word not in TRUE | FALSE | {"auto"}:
        raise ConfigError(f"{value!r} is not supported; supported: auto, off, 1, 0")
    return "off" if word in FALSE else "auto"


def log_level(value: Any) -> str:
    """Convert the name of a log level, to upper case."""
    return one_of(("debug", "info", "warning", "error", "critical"))(value).upper()


def text(what: str, most: int) -> Callable[[Any], str]:
    """Return a converter to text of 1 to `most` characters. `what` names it in the message."""

    def convert(value: Any) -> str:
        found = str(value)
        if not 0 < len(found) <= most:
            raise ConfigError(f"{what} has 1 to {most} characters, not {len(found)}")
        return found

    return convert


def slice_text(value: Any) -> str:
    """Check a slice; return its text."""
    return Slice(str(value)).text


def sample_every(mode: str) -> int:
    """Return N of mode `sample:1/N`; 1 for a mode that keeps every call. Raises ConfigError if N is too large."""
    match = _SAMPLE.fullmatch(mode)
    if match is None:
        return 1
    every = int(match[1])
    if every > _MAX_SAMPLE_EVERY:
        raise ConfigError(f"{mode!r}: N is not between 1 and {_MAX_SAMPLE_EVERY}")
    return every


def mode(words: tuple[str, ...]) -> Callable[[Any], str]:
    """Return a converter to one of `words`, or to `sample:1/N`."""
    word_of = one_of((*words, "sample:1/N"))

    def convert(value: Any) -> str:
        text = str(value).strip().lower()
        return text if _SAMPLE.fullmatch(text) and sample_every(text) else word_of(value)

    return convert


def quota(value: Any) -> str:
    """Check a quota "N/M"; return its text."""
    parse_quota(str(value))
    return str(value).strip()


def emulation(value: Any) -> Optional[str]:
    """Convert a recipe to the text that `capd_client.emulate` reads; None for a recipe that changes nothing."""
    # Imported here because not every tool needs the formats.
    from capd_client.config.recipe import Recipe

    text = str(value).strip()
    if text.lower() in ("off", "none"):
        return None
    recipe = Recipe.of(text)
    return None if recipe.is_none else recipe.text()


def perturbation(value: Any) -> str:
    """Check a perturbation "EPS" or "EPS:SEED": a relative change above 0 and at most 0.1; return its text."""
    text = str(value).strip()
    eps, colon, seed = text.partition(":")
    try:
        number = float(eps)
    except ValueError:
        number = math.nan
    if not 0 < number <= 0.1 or (colon and not (seed.isascii() and seed.isdecimal() and len(seed) < 10)):
        raise ConfigError(f"{text!r:.80} is no perturbation; write EPS or EPS:SEED, as 1e-7 or 1e-7:3")
    return text


def store_root(directory: str) -> str:
    """Return the directory of runs for a TENSOR_SAVE_DIR. For a directory named after a quant type, it is the parent.

    Scripts for tensor_saver had a directory for each type. In capd the type is part of each record's key.
    """
    parent, name = os.path.split(directory.rstrip("/") or "/")
    return (parent or ".") if name.lower() in FORMATS else directory
