"""The placeholders `{quant_type}`, `{run_dir}` and `{index}` in a command and its variables, filled for each type."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from capd.errors import ConfigError

__all__ = ["Filled", "fill", "parse_variables", "shared_places"]

_PLACEHOLDER = re.compile(r"\{(quant_type|run_dir|index)\}")


@dataclass(frozen=True)
class Filled:
    """A command, its variables, paths that must exist, and a directory, all for one type."""

    command: tuple[str, ...]
    variables: dict[str, str]
    required: tuple[str, ...]
    run_dir: Path


def parse_variables(texts: Sequence[str]) -> dict[str, str]:
    """Return the variables of the `--env K=V` options. Raises ConfigError for an entry without a name or value."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or "\0" in text:
            raise ConfigError(f"--env: {text[:80]!r} is not NAME=VALUE")
        found[name] = value
    return found


def fill(
    command: Sequence[str],
    variables: dict[str, str],
    required: Sequence[str],
    *,
    quant_type: str,
    run_dir: Path,
    index: int,
) -> Filled:
    """Replace the placeholders everywhere by the values of one type. Other braces stay unchanged."""
    values = {"quant_type": quant_type, "run_dir": str(run_dir), "index": str(index)}

    def filled(text: str) -> str:
        return _PLACEHOLDER.sub(lambda found: values[found[1]], text)

    return Filled(
        tuple(map(filled, command)),
        {name: filled(value) for name, value in variables.items()},
        tuple(map(filled, required)),
        run_dir,
    )


def shared_places(command: Sequence[str], variables: dict[str, str], types: int) -> str | None:
    """Return a warning if the command is the same for several types, otherwise None."""
    if types < 2 or any(map(_PLACEHOLDER.search, (*command, *variables.values()))):
        return None
    return (
        "CMD is the same for all types: if the first one saves a checkpoint, the second one resumes from it and does "
        "not start where the first did. Put {run_dir} (a directory for each type), {quant_type} or {index} into CMD or "
        "--env K=V, such as: -- train.sh --save '{run_dir}/checkpoints'"
    )
