"""The code blocks of a page, run in their order as a reader would run them.

Blocks in bash are commands, those in python one session. Blocks without a language show output and are not run. A
reader's `capd`, `python` and `torchrun` are those of the tests, forked from a process that has imported torch.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.kit import forking

__all__ = ["Block", "blocks", "commands", "run_bash", "run_python"]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LONGEST_S = 300


class Block(NamedTuple):
    """A block of a page. place: the page and the line of its first line."""

    language: str
    text: str
    place: str


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in their order."""
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(2)) + 1
        yield Block(match[1], match[2], f"{page.name}:{line}")


def commands(directory: Path) -> dict[str, str]:
    """Return an environment whose PATH begins with `capd`, `python` and `torchrun`, written to `directory`."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CAPD_")}
    environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    python = forking.stand_in_for(environ, imports=forking.TRAINING)
    capd = forking.stand_in_for(environ, imports=forking.CAPD)
    directory.mkdir()
    for name, words in (
        ("python", f"{python}"),
        ("torchrun", f"{python} -m torch.distributed.run"),
        ("capd", f"{capd} -m capd"),
    ):
        program = directory / name
        program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        program.chmod(0o700)
    return environ | {"PATH": f"{directory}:{environ['PATH']}", "PYTHON_EXEC": python}


def run_bash(block: Block, directory: Path, environ: dict[str, str]) -> str:
    """Run the commands of a block; fail with what they said if one of them fails. Return what they printed."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=directory, env=environ, capture_output=True, text=True, timeout=_LONGEST_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{block.place}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def run_python(source: str, place: str, session: dict[str, Any]) -> Any:
    """Run statements in a session of Python, whose names they read and write.

    Returns:
        The value of the last statement if it is an expression, as a notebook shows it; else None.
    """
    tree = ast.parse(source, place)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, place, "exec"), session)  # noqa: S102
    return eval(compile(ast.Expression(last.value), place, "eval"), session) if last else None  # noqa: S307
