"""The names of the same modules in two frameworks, read from TOML: globs, and how fused modules are cut."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from capd.errors import ConfigError

__all__ = ["PRESETS", "Counterpart", "MapSide", "ModulePair", "NameMap", "load_map", "parse_map"]

PRESETS = ("megatron-hf", "megatron-torchtitan")
"""The maps that capd brings along (`capd/layouts/maps`)."""

# How many modules are on the right. One for qkv: it is fused there, too.
_SPLITS: dict[str, tuple[int, ...]] = {"none": (1,), "qkv": (3, 1), "gated": (2,)}
_ORDERS = ("sbh", "bsh")
_ROTARY = ("half", "interleaved")
_SIDE_KEYS = {"name": str, "order": str, "rotary": str}
_PAIR_KEYS = ("left", "right", "split")
_LARGEST_FILE = 1 << 20
_MOST_PAIRS = 10_000


class MapSide(NamedTuple):
    """One framework of a map.

    Attributes:
        name: What it is called.
        order: The order of the first axes of activations: "sbh" (sequence, batch) or "bsh".
        rotary: The order of the rows of a head under rotary embeddings: "half" (all real parts, then all imaginary
            ones, as Hugging Face and Megatron) or "interleaved" (pairs, as Meta's Llama and torchtitan).
    """

    name: str
    order: str = "bsh"
    rotary: str = "half"


class ModulePair(NamedTuple):
    """A module of the left framework, and the modules of the right one that compute the same.

    Attributes:
        left: A glob; each `*` is one word between dots.
        right: As many globs as `split` has parts; one for a projection that is fused in the same order on the right.
        split: "none"; "qkv", a fused projection in Megatron's order of groups; "gated", the gate, then the other half.
    """

    left: str
    right: tuple[str, ...]
    split: str


class Counterpart(NamedTuple):
    """What a left module is called on the right."""

    right: tuple[str, ...]
    split: str


class NameMap:
    """A map between the names of modules of two frameworks."""

    def __init__(self, left: MapSide, right: MapSide, pairs: Sequence[ModulePair]) -> None:
        self.left, self.right = left, right
        self._pairs = [(_pattern(pair.left), pair) for pair in pairs]
        self._rights = [_pattern(glob) for pair in pairs for glob in pair.right]

    def counterparts(self, module: str) -> list[Counterpart]:
        """Return the right names of a left module, by each pair that matches. A run has those of one of them."""
        return [
            Counterpart(tuple(_filled(glob, found.groups()) for glob in pair.right), pair.split)
            for pattern, pair in self._pairs
            if (found := pattern.fullmatch(module)) is not None
        ]

    def is_left(self, modules: Iterable[str], others: Iterable[str]) -> bool:
        """Return whether `modules` are of the left framework and `others` of the right one, rather than vice versa.

        Raises:
            ConfigError: The map has names of neither.
        """
        modules, others = set(modules), set(others)
        straight = self._lefts_in(modules) * self._rights_in(others)
        crossed = self._lefts_in(others) * self._rights_in(modules)
        if not straight and not crossed:
            some = ", ".join(sorted(modules)[:2]), ", ".join(sorted(others)[:2])
            raise ConfigError(
                f"--map: no module of one run is {self.left.name}'s while one of the other is {self.right.name}'s; "
                f"the first run has {some[0]}, the second {some[1]}"
            )
        return straight >= crossed

    def _lefts_in(self, modules: Iterable[str]) -> int:
        return sum(any(pattern.fullmatch(module) for pattern, _ in self._pairs) for module in modules)

    def _rights_in(self, modules: Iterable[str]) -> int:
        return sum(any(pattern.fullmatch(module) for pattern in self._rights) for module in modules)


def load_map(name: str) -> NameMap:
    """Read a map: one of `PRESETS`, or the path of a TOML file (docs/comparing-layouts.md).

    Raises:
        ConfigError: There is no such map, or the file says something that is not valid. The message names its line.
    """
    if name in PRESETS:
        text = files("capd.layouts").joinpath("maps", f"{name}.toml").read_text("utf-8")
        return parse_map(text, name)
    path = Path(name)
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ConfigError(f"--map {name}: the file is larger than 1 MiB")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            f"--map {name}: {error}; give one of {', '.join(PRESETS)}, or a TOML file"
        ) from None
    return parse_map(text, name)


def parse_map(text: str, name: str) -> NameMap:
    """Read the text of a map. `name` is for messages. Raises ConfigError as `load_map`."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--map {name}: {error}") from None
    source = _Source(name, text)
    if unknown := [key for key in table if key not in ("left", "right", "module")]:
        source.fail(
            source.line_of(unknown[0]), f"unknown key {unknown[0]!r}; use [left], [right], [[module]]"
        )
    pairs: Any = table.get("module")
    if not isinstance(pairs, list) or not pairs or len(pairs) > _MOST_PAIRS:
        source.fail(1, "there is no [[module]], or there are more than 10,000")
    return NameMap(
        _side(source, table, "left"),
        _side(source, table, "right"),
        [_pair(source, number, pair) for number, pair in enumerate(pairs)],
    )


class _Source:
    """The text of a map, to name lines in messages."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._lines = name, text.splitlines()

    def line_of(self, key: str, after: int = 1) -> int:
        """Return the first line, from `after` on, that begins with a key or a table of this name."""
        for number, line in enumerate(self._lines[after - 1 :], after):
            if re.match(rf"\s*\[*\s*[\"']?{re.escape(key)}[\"']?\s*[\]=.]", line):
                return number
        return after

    def line_of_pair(self, number: int) -> int:
        """Return the line of the [[module]] with this number."""
        found = [at for at, line in enumerate(self._lines, 1) if re.match(r"\s*\[\[\s*module\s*\]\]", line)]
        return found[number] if number < len(found) else 1

    def fail(self, line: int, problem: str) -> Any:
        raise ConfigError(f"--map {self._name}, line {line}: {problem}")


def _side(source: _Source, table: Mapping[str, Any], which: str) -> MapSide:
    side = table.get(which, {})
    at = source.line_of(which)
    if not isinstance(side, dict):
        source.fail(at, f"{which} must be a table")
    for key, value in side.items():
        if key not in _SIDE_KEYS or not isinstance(value, str):
            source.fail(
                source.line_of(key, at), f"{which}.{key}: use name, order and rotary, each with a string"
            )
    order, rotary = side.get("order", "bsh"), side.get("rotary", "half")
    if order not in _ORDERS:
        source.fail(
            source.line_of("order", at), f"{which}.order is {order!r:.80}; use one of {', '.join(_ORDERS)}"
        )
    if rotary not in _ROTARY:
        source.fail(
            source.line_of("rotary", at), f"{which}.rotary is {rotary!r:.80}; use one of {', '.join(_ROTARY)}"
        )
    return MapSide(side.get("name", which), order, rotary)


def _pair(source: _Source, number: int, pair: Any) -> ModulePair:
    at = source.line_of_pair(number)
    if not isinstance(pair, dict):
        source.fail(at, "module must be a table")
    for key in pair:
        if key not in _PAIR_KEYS:
            source.fail(source.line_of(key, at), f"unknown key {key!r:.80}; use {', '.join(_PAIR_KEYS)}")
    left, right, split = pair.get("left"), pair.get("right"), pair.get("split", "none")
    if not isinstance(left, str) or not left:
        source.fail(
            source.line_of("left", at), "left must be a glob, such as decoder.layers.*.mlp.linear_fc2"
        )
    rights = (right,) if isinstance(right, str) else right
    if not isinstance(rights, (list, tuple)) or not all(isinstance(one, str) and one for one in rights):
        source.fail(source.line_of("right", at), "right must be a glob, or a list of globs")
    if not isinstance(split, str) or split not in _SPLITS:
        source.fail(source.line_of("split", at), f"split is {split!r:.80}; use one of {', '.join(_SPLITS)}")
    if len(rights) not in _SPLITS[split]:
        needed = " or ".join(map(str, _SPLITS[split]))
        source.fail(
            source.line_of("right", at), f"split {split} needs {needed} on the right, not {len(rights)}"
        )
    for glob in rights:
        if glob.count("*") != left.count("*"):
            source.fail(
                source.line_of("right", at),
                f"{glob!r:.120} has {glob.count('*')} wildcards, and {left!r:.120} has {left.count('*')}",
            )
    return ModulePair(left, tuple(rights), split)


def _pattern(glob: str) -> re.Pattern[str]:
    return re.compile(r"([^.]+)".join(map(re.escape, glob.split("*"))))


def _filled(glob: str, words: Sequence[str]) -> str:
    parts = glob.split("*")
    return "".join(part + word for part, word in zip(parts, (*words, ""), strict=True))
