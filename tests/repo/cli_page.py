"""Writes docs/cli.md from the help of every command and the hand-written parts in docs/cli: `make cli-page`.

A help text is paragraphs. One that begins with \\b is a block with a title: examples, or a list of words and meanings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from capd.cli.app import VERBS, app

__all__ = ["DOCS", "PAGE", "commands", "page"]

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "cli.md"
_NOTE = "<!-- Written by `make cli-page` from the help of each command and from docs/cli/*.md: change those. -->\n"
_CODE = re.compile(r"`[^`]*`|(?<![\w-])--?[a-z][\w-]*|\b(?:CAPD|XDG)_[A-Z_]+\b(?:=\w+)?|\{\w+\}|'\*[^']*'")
_ITEM = re.compile(r"(\S.*?)  +(\S.*)")


def page() -> str:
    """The whole page, as it should be in docs/cli.md."""
    parts = [_NOTE, (DOCS / "cli" / "start.md").read_text()]
    for name, command, context in commands():
        parts += _section(name, command, context)
        written_by_hand = DOCS / "cli" / f"{name.removeprefix('capd ')}.md"
        parts += [written_by_hand.read_text()] if written_by_hand.is_file() else []
    return "\n".join(parts)


def commands() -> Iterator[tuple[str, Any, Any]]:
    """Every command with its full name and its context; a group comes before its commands."""
    root = typer.Context(typer.main.get_command(app), info_name="capd")
    for verb in VERBS:
        yield from _below(root, verb)


def _below(parent: typer.Context, name: str) -> Iterator[tuple[str, Any, Any]]:
    command: Any = parent.command
    context = typer.Context(command.get_command(parent, name), info_name=name, parent=parent)
    yield context.command_path, context.command, context
    for below in getattr(context.command, "commands", ()):
        yield from _below(context, below)


def _section(name: str, command: Any, context: Any) -> Iterator[str]:
    """Heading, usage, help, arguments and options of one command; each part ends with a line's end."""
    yield f"{'#' * name.count(' ')}# {name}\n"
    yield f"    {' '.join([name, *command.collect_usage_pieces(context)])}\n"
    for paragraph in command.help.split("\n\n"):
        yield _block(paragraph) if paragraph.startswith("\b\n") else _prose(paragraph) + "\n"
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in parameter.opts:
            kind = "argument" if parameter.param_type_name == "argument" else "option"
            title = getattr(parameter, "rich_help_panel", None) or kind
            text = _without_type(record[0]) if kind == "argument" else record[0]
            groups.setdefault(title, []).append((text, record[1]))
    for title, rows in groups.items():
        yield _table(title, rows)
    if f"\n## {name}\n" in (DOCS / "json.md").read_text():
        yield f"The fields of `--json`: [json.md](json.md#{name.replace(' ', '-')}).\n"


def _without_type(argument: str) -> str:
    return re.sub(r" <\S+>$", "", argument)


def _block(text: str) -> str:
    """A paragraph with a title, whose lines stay as they are."""
    _, title, *lines = text.split("\n")
    if title == "Examples:":
        return "\n".join(["```sh", *(line.strip() for line in lines), "```\n"])
    items: list[tuple[str, str]] = []
    for line in lines:
        found = _ITEM.fullmatch(line.removeprefix("  "))
        if found:
            items.append((found[1], found[2]))
        else:
            items[-1] = (items[-1][0], f"{items[-1][1]} {line.strip()}")
    return _table(title.removesuffix(":").lower().removesuffix("s"), items)


def _table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    numbers = title == "exit code"
    cells = (f"| {name if numbers else _code(name)} | {_prose(text)} |" for name, text in rows)
    return "\n".join([f"| {title} | meaning |", "|---|---|", *cells]) + "\n"


def _code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`"


def _prose(text: str) -> str:
    """Help as Markdown: options, variables and globs as code, pages as links, everything else as it is."""
    parts: list[str] = []
    end = 0
    for found in _CODE.finditer(text):
        parts += [_escaped(text[end : found.start()]), _code(found[0].strip("`"))]
        end = found.end()
    return "".join([*parts, _escaped(text[end:])])


def _escaped(text: str) -> str:
    # Two brackets side by side would be a link to a heading.
    text = re.sub(r"([|*<]|(?<=\])\[)", r"\\\1", text)
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text)


if __name__ == "__main__":
    PAGE.write_text(page())
