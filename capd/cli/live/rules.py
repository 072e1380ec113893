"""`capd rules check`: the rules of capd.toml in words, and what is wrong with them."""

from __future__ import annotations

import typer

from capd.cli.options import Config, Json
from capd.cli.output import print_json, print_lines
from capd.errors import ConfigError
from capd_client.process.text import printable

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Check the rules of [[trigger]] in capd.toml."""


@app.command(short_help="Print each rule in words, or what is wrong with it.")
def check(config: Config = None, as_json: Json = False) -> None:
    """Print each rule of [[trigger]] in words, or each problem, a line each.

    \b
    Examples:
      capd rules check
      capd rules check --config capd.toml

    \b
    Exit codes:
      2  a rule cannot be used
    """
    from capd.config import config_path, load_daemon_settings, read_file
    from capd.rules.refusals import refusals
    from capd.rules.schema import parse_triggers, trigger_problems
    from capd.rules.words import rule_text

    path = config_path(path=config)
    if path is None:
        raise ConfigError("there is no capd.toml; name one with --config, or CAPD_CONFIG")
    tables = read_file(path)[0].get("trigger", [])
    problems = trigger_problems(tables)
    rules = [] if problems else parse_triggers(tables)
    if rules:
        settings = load_daemon_settings({}, path=path)
        problems = refusals(
            rules,
            statistics=settings.statistics,
            keeps=settings.window is not None,
            lab_formats=settings.lab_formats,
        )
    problems = [f"{path}: {problem}" for problem in problems]
    if as_json:
        words = {} if problems else {rule.name: rule_text(rule) for rule in rules}
        print_json({"file": str(path), "rules": words, "problems": problems})
    elif problems or rules:
        print_lines(map(printable, problems or map(rule_text, rules)))
    else:
        print_lines([f"{path}: no [[trigger]]"])
    if problems:
        raise typer.Exit(2)
