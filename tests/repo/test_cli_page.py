"""docs/cli.md is what the commands say of themselves, and their help can be read on a terminal."""

from __future__ import annotations

import re

import pytest

from capd.cli.app import VERBS
from capd.report.figures.kinds import KINDS
from tests.repo.cli_page import DOCS, PAGE, commands, page

COMMANDS = {name: (command, context) for name, command, context in commands()}


def test_the_page_is_what_the_help_of_the_commands_says() -> None:
    assert PAGE.read_text() == page(), (
        "docs/cli.md is not up to date: run `make cli-page` and commit the page"
    )


def test_every_part_written_by_hand_is_of_a_verb() -> None:
    assert {path.stem for path in (DOCS / "cli").glob("*.md")} <= {"start", *VERBS}


def test_every_section_of_json_fields_is_of_a_command_with_json() -> None:
    sections = set(re.findall(r"^## (.*)$", (DOCS / "json.md").read_text(), re.MULTILINE))
    printing = {name for name, (command, _) in COMMANDS.items() if "--json" in options(command)}
    of_ctl = {name for name in printing if name.startswith("capd ctl ")}  # which share a section

    assert sections == printing - of_ctl | {"capd ctl"}


def test_the_exit_codes_of_the_page_are_those_of_the_commands() -> None:
    start = (DOCS / "cli" / "start.md").read_text()
    general = {int(code) for code in re.findall(r"^\| (\d+) \|", start, re.MULTILINE)}
    of_commands = set(
        re.findall(r"^  (\d+)  ", "\n".join(one.help for one, _ in COMMANDS.values()), re.MULTILINE)
    )

    assert len(of_commands) > 5
    assert {int(code) for code in of_commands} <= general | {126, 127}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_terminal_and_explains_every_option(name: str) -> None:
    command, context = COMMANDS[name]
    shown = command.get_help(context)

    assert max(map(len, shown.splitlines())) <= 80
    assert [line for line in shown.splitlines()[1:] if line.endswith("...")] == []  # cut short
    assert [one.name for one in command.get_params(context) if not (one.help or one.hidden)] == []


def test_the_help_of_plot_names_every_kind() -> None:
    named = re.findall(
        r"^  (\w+)  ", COMMANDS["capd plot"][0].help.split("Kinds:\n")[1].split("\n\n")[0], re.MULTILINE
    )

    assert named == [*KINDS, "trend"]


def options(command: object) -> set[str]:
    return {option for one in command.params for option in one.opts}  # type: ignore[attr-defined]
