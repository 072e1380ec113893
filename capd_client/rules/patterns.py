"""Regular expressions over module names, from the user's own files: bounded, so that none can hold up a job.

Python's matcher tries every way to divide a name among the repetitions of a pattern. Repetitions inside a repeated
group make those exponentially many, so such groups are refused; the number of repetitions and the length are limited.
"""

from __future__ import annotations

import re

from capd_client.errors import ConfigError

__all__ = ["MAX_PATTERN_CHARS", "MAX_REPETITIONS", "compile_pattern"]

MAX_PATTERN_CHARS = 256
MAX_REPETITIONS = 8


def compile_pattern(text: str) -> re.Pattern[str]:
    """The expression, to be searched for in names. Raises ConfigError, naming it, for one that cannot be used."""
    if not 0 < len(text) <= MAX_PATTERN_CHARS:
        raise ConfigError(f"a regular expression has 1 to {MAX_PATTERN_CHARS} characters, not {len(text)}")
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError, Warning) as error:  # Warning: under python -W error
        raise ConfigError(f"{text!r} is no regular expression: {error}") from None
    repetitions, nested = _repetitions(text)
    if nested:
        raise ConfigError(
            f"{text!r} repeats a group that holds a repetition or an alternative, which can take for ever; write "
            r"a class of characters, such as [\d.]*"
        )
    if repetitions > MAX_REPETITIONS:
        raise ConfigError(f"{text!r} has {repetitions} repetitions, more than {MAX_REPETITIONS}")
    return pattern


def _repetitions(text: str) -> tuple[int, bool]:
    """How many there are of `*`, `+`, `?` and `{}`, and whether a repeated group holds one, or an alternative."""
    count, at = 0, 0
    groups = [False]  # of each open group: whether it holds one
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
        elif character == "[":
            at = _end_of_class(text, at)
        elif character == "(":
            groups.append(False)
            at += text[at + 1 : at + 2] == "?"
        elif character == ")" and len(groups) > 1:
            holds = groups.pop()
            if holds and text[at + 1 : at + 2] in ("*", "+", "{"):
                return count, True
            groups[-1] |= holds
        elif character in "*+?{|":
            groups[-1] = True
            count += character != "|"
            if character == "{":
                at = max(at, text.find("}", at))
            at += character != "|" and text[at + 1 : at + 2] in ("?", "+")  # lazy, or possessive
        at += 1
    return count, False


def _end_of_class(text: str, at: int) -> int:
    """Where the class of characters that begins at `at` ends; `]` in first place is one of them."""
    at += 1 + (text[at + 1 : at + 2] == "^")
    at += 1
    while at < len(text) and text[at] != "]":
        at += 1 + (text[at] == "\\")
    return at
