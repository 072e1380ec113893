"""A sentence as a template and its values, so that another language needs no more than another template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Union

__all__ = ["Phrase", "Value", "listed", "phrase_text", "plain_phrase"]

Value = Union["Phrase", str]


class Phrase(NamedTuple):
    """An English template with the places {0}, {1} …, and their values: finished texts, or phrases again.

    The report's page has the templates of other languages in `words.js`, by the English one.
    """

    template: str
    values: tuple[Value, ...] = ()


def phrase_text(phrase: Value) -> str:
    """Return a phrase in English."""
    return phrase if isinstance(phrase, str) else phrase.template.format(*map(phrase_text, phrase.values))


def plain_phrase(phrase: Value) -> Any:
    """Return a phrase for JSON: a text, or a list of the template and the values."""
    return phrase if isinstance(phrase, str) else [phrase.template, *map(plain_phrase, phrase.values)]


def listed(words: Sequence[Value], last: str) -> Value:
    """Return a list of words. `last` is the template of the last two: "{0} and {1}" or "{0} or {1}"."""
    if len(words) == 1:
        return words[0]
    first, *others = words[:-1]
    for word in others:
        first = Phrase("{0}, {1}", (first, word))
    return Phrase(last, (first, words[-1]))
