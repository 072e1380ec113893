"""The options with which several verbs select series by their keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import wraps
from typing import Annotated, Any

import typer

from capd.store.documents.gradient_names import answers
from capd_client.protocol.selection import Ranges

__all__ = ["Tests", "selects_keys"]

Test = Callable[[Any], bool]
Tests = Sequence[Test]


def _words(flag: str, what: str) -> Any:
    help_text = f"{what} May be given several times."
    return Annotated[list[str] | None, typer.Option(flag, metavar="WORD", help=help_text, show_default=False)]


def _range(flag: str, what: str) -> Any:
    return Annotated[str | None, typer.Option(flag, metavar="RANGE", help=what)]


_OPTIONS = {
    "quant_type": _words("--quant-type", "Quant type: bf16, mxfp8, …"),
    "rank": _range("--rank", 'Ranks: "0", "0-3,8".'),
    "layer": _range("--layer", 'Layers: "0-3,8", or "none" for tensors outside of layers.'),
    "phase": _words("--phase", "Phase: pre or post."),
    "layer_type": _words("--layer-type", "Layer type: attention, linear, …"),
    "component": _words("--component", "Component: FA, linear, …"),
    "operation": _words("--operation", "Operation: forward or backward."),
    "tensor_name": _words("--tensor", "Tensor name: input, query, grad_output, …"),
    "module": _words("--module", "Glob of module names, such as '*.mlp.*'."),
}
"""The option of each field of a key, in the order of `--help`."""


def selects_keys(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that select series, in the place of its parameter `tests`.

    Args:
        command: A function for typer. Its `tests` gets one test for each option that was given. A key, or a row with
            a key's fields, is selected if it passes all of them.

    Returns:
        The function to register with typer. It raises ConfigError for a range that cannot be read.
    """
    parameters: list[inspect.Parameter] = []
    signature = inspect.signature(command, eval_str=True)
    for parameter in signature.parameters.values():
        parameters += _parameters() if parameter.name == "tests" else [parameter]

    @wraps(command)
    def with_options(**given: Any) -> None:
        chosen = {field: given.pop(field) for field in _OPTIONS}
        command(**given, tests=[_test(field, wanted) for field, wanted in chosen.items() if wanted])

    # typer reads the options from the signature and the annotations.
    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def _parameters() -> list[inspect.Parameter]:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [
        inspect.Parameter(field, kind, default=None, annotation=option) for field, option in _OPTIONS.items()
    ]


def _test(field: str, wanted: Any) -> Test:
    if field == "module":
        return lambda row: any(fnmatchcase(row.module, glob) for glob in wanted)
    if isinstance(wanted, str):
        return _in_ranges(field, wanted)
    words = frozenset(wanted)
    return lambda row: answers(row, field, words)


def _in_ranges(field: str, text: str) -> Test:
    parts = [part.strip() for part in text.split(",")]
    none = "none" in parts
    numbers = Ranges(",".join(part for part in parts if part != "none"))
    return lambda row: none if (value := getattr(row, field)) is None else value in numbers
