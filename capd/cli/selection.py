"""The options with which several verbs select series by their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Any

from capd.cli.completion import values_of
from capd.cli.options import option
from capd.errors import NothingMatched
from capd.store.documents.gradient_names import answers
from capd_client.process.text import number_ranges
from capd_client.protocol.selection import Ranges

__all__ = ["KeyOptions", "Tests"]

# The number of values that a message names.
_NAMED = 8
Test = Callable[[Any], bool]
Tests = Sequence[Test]


def _words(name: str, field: str, text: str) -> Any:
    text = f"{text} May be given several times."
    return option(name, "WORD", text, show_default=False, autocompletion=values_of(field))


@dataclass(frozen=True)
class KeyOptions:
    """The options that select series. Each is named as the field of the key that it selects by."""

    quant_type: Annotated[
        list[str] | None, _words("--quant-type", "quant_type", "Quant type: bf16, mxfp8, …")
    ] = None
    rank: Annotated[
        str | None, option("--rank", "RANGE", 'Ranks: "0", "0-3,8".', autocompletion=values_of("rank"))
    ] = None
    layer: Annotated[
        str | None,
        option(
            "--layer",
            "RANGE",
            'Layers: "0-3,8", or "none" for tensors outside of layers.',
            autocompletion=values_of("layer"),
        ),
    ] = None
    phase: Annotated[list[str] | None, _words("--phase", "phase", "Phase: pre or post.")] = None
    layer_type: Annotated[
        list[str] | None, _words("--layer-type", "layer_type", "Layer type: attention, linear, …")
    ] = None
    component: Annotated[list[str] | None, _words("--component", "component", "Component: FA, linear, …")] = (
        None
    )
    operation: Annotated[
        list[str] | None, _words("--operation", "operation", "Operation: forward or backward.")
    ] = None
    tensor_name: Annotated[
        list[str] | None, _words("--tensor", "tensor_name", "Tensor name: input, query, grad_output, …")
    ] = None
    module: Annotated[
        list[str] | None, _words("--module", "module", "Glob of module names, such as '*.mlp.*'.")
    ] = None

    def tests(self) -> Tests:
        """Return one test for each given option. A key, or a row with its fields, is selected if it passes all.

        Raises:
            ConfigError: If a range cannot be read.
        """
        return [_test(field, wanted) for field, wanted in vars(self).items() if wanted]

    def nothing_in(self, place: str, keys: Iterable[Any]) -> NothingMatched:
        """Return the error that no key of a place passes all tests.

        It names the values that there are, and the one that was probably meant.
        """
        everything = list(keys)
        if not everything:
            return NothingMatched(f"{place} has no tensors yet")
        reasons = [
            _reason(field, wanted, everything)
            for field, wanted in vars(self).items()
            if wanted and not any(map(_test(field, wanted), everything))
        ]
        why = "; ".join(reasons) or "each option matches some series, but none matches all of them"
        return NothingMatched(f"no series in {place} matches the selection: {why}")


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


def _reason(field: str, wanted: Any, keys: Sequence[Any]) -> str:
    words = [wanted] if isinstance(wanted, str) else list(wanted)
    there = {getattr(key, field) for key in keys}
    numbers = sorted(value for value in there if isinstance(value, int))
    names = sorted(value for value in there if isinstance(value, str))
    known = (
        number_ranges(numbers) if numbers else ", ".join(names[:_NAMED]) + (", …" if names[_NAMED:] else "")
    )
    close = [match for word in words for match in get_close_matches(word, names, 1, 0.5)]
    meant = f"; did you mean {' or '.join(dict.fromkeys(close))}?" if close else ""
    name = "tensor" if field == "tensor_name" else field.replace("_", "-")
    return f"--{name} {','.join(words)} matches none of {known or 'none'}{meant}"
