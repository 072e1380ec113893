"""Bounded regular expressions over module names: a pattern from a user's file cannot hold up a job.

Python's matcher tries every way to divide a name among the repetitions of a pattern. Repetitions inside a repeated
group make the number of ways exponential, so such groups are refused. The length of a pattern and the number of its
repetitions are limited.
"""

from __future__ import annotations

import re

from capd_client.errors import ConfigError

__all__ = ["MAX_PATTERN_CHARS", "MAX_REPETITIONS", "compile_pattern"]

MAX_PATTERN_CHARS = 256
MAX_REPETITIONS = 8


def compile_pattern(text: str) -> re.Pattern[str]:
    """Return the compiled expression, to be searched for in names.

    Raises:
        ConfigError: The expression is invalid or beyond the limits. The message quotes it.
    """
    if not 0 < len(text) <= MAX_PATTERN_CHARS:
        raise ConfigError(f"a regular expression has 1 to {MAX_PATTERN_CHARS} characters, not {len(text)}")
    try:
        pattern = re.compile(text)
    # A Warning is raised under python -W error.
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise ConfigError(f"{text!r} is not a regular expression: {error}") from None
    repetitions, nested = _repetitions(text)
    if nested:
        raise ConfigError(
            f"{text!r} repeats a group that holds a repetition or an alternative, which can take forever; use "
            r"a character class, such as [\d.]*"
        )
    if repetitions > MAX_REPETITIONS:
        raise ConfigError(f"{text!r} has {repetitions} repetitions, more than {MAX_REPETITIONS}")
    return pattern


def _repetitions(text: str) -> tuple[int, bool]:
    """Return the number of `*`, `+`, `?` and `{}`, and whether a repeated group holds one of them or an alternative."""
    count, at = 0, 0
    # For each open group: whether it holds a repetition or an alternative.
    groups = [False]
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
            # Skip the mark of a lazy or possessive repetition.
            at += character != "|" and text[at + 1 : at + 2] in ("?", "+")
        at += 1
    return count, False


def _end_of_class(text: str, at: int) -> int:
    """Return the end of the character class that begins at `at`; `]` as its first character belongs to it."""
    at += 1 + (text[at + 1 : at + 2] == "^")
    at += 1
    while at < len(text) and text[at] != "]":
        at += 1 + (text[at] == "\\")
    return at
