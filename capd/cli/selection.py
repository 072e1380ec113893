"""The options with which several verbs choose series by their keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer

from capd.store.gradient_names import answers
from capd_client.select import Ranges

__all__ = [
    "Components", "LayerRange", "LayerTypes", "Modules", "Operations", "Phases", "QuantTypes", "RankRange", "Tensors",
    "key_filters",
]  # fmt: skip

Words = list[str] | None
Filter = Callable[[Any], bool]


def _words(flag: str, what: str) -> Any:
    return typer.Option(flag, metavar="WORD", help=f"{what}; may be given several times.", show_default=False)


QuantTypes = Annotated[Words, _words("--quant-type", "bf16, mxfp8, …")]
RankRange = Annotated[str | None, typer.Option("--rank", metavar="RANGE", help='Ranks: "0", "0-3,8".')]
LayerRange = Annotated[
    str | None, typer.Option("--layer", metavar="RANGE", help='Layers: "0-3,8", or "none".')
]
Phases = Annotated[Words, _words("--phase", "pre or post")]
LayerTypes = Annotated[Words, _words("--layer-type", "attention, linear, …")]
Components = Annotated[Words, _words("--component", "FA, linear, …")]
Operations = Annotated[Words, _words("--operation", "forward or backward")]
Tensors = Annotated[Words, _words("--tensor", "Tensor name: input, query, grad_output, …")]
Modules = Annotated[Words, _words("--module", "Glob over module names, such as '*.mlp.*'")]


def key_filters(
    *,
    quant_type: Words,
    rank: str | None,
    layer: str | None,
    phase: Words,
    layer_type: Words,
    component: Words,
    operation: Words,
    tensor: Words,
    module: Words,
) -> list[Filter]:
    """Tests that a chosen key, or a row with its fields, passes all of. Raises ConfigError for what is no range."""
    words = {
        "quant_type": quant_type, "phase": phase, "layer_type": layer_type, "component": component,
        "operation": operation, "tensor_name": tensor,
    }  # fmt: skip
    filters = [_exact(field, wanted) for field, wanted in words.items() if wanted]
    filters += [_in_ranges(field, text) for field, text in (("rank", rank), ("layer", layer)) if text]
    filters += [_glob("module", module)] if module else []
    return filters


def _exact(field: str, words: Sequence[str]) -> Filter:
    wanted = frozenset(words)
    return lambda row: answers(row, field, wanted)


def _glob(field: str, globs: Sequence[str]) -> Filter:
    return lambda row: any(fnmatchcase(getattr(row, field), glob) for glob in globs)


def _in_ranges(field: str, text: str) -> Filter:
    parts = [part.strip() for part in text.split(",")]
    none = "none" in parts
    numbers = Ranges(",".join(part for part in parts if part != "none"))
    return lambda row: none if (value := getattr(row, field)) is None else value in numbers
