"""`capd config`: shows every setting of the daemon and of the training job with its origin, and finds wrong ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from capd.cli.options import Config, Json, Wide, flag
from capd.cli.output import note, print_either
from capd.cli.table import TextTables
from capd_client.process.text import printable

__all__ = ["app"]

_UNSET = {
    "rules": "everything",
    "slice": "whole tensors",
    "quant_type": "the tensor's dtype",
    "max_mb_per_step": "no limit",
    "max_d2h_gbps": "no limit",
    "ring": "wait under policy block, else drop",
    "sample_idx": "none",
    "embedded": "no",
    "log": "warnings",
    "emulate": "none",
    "keep_last": "no rule",
    "keep_within": "no rule",
    "max_size": "no rule",
    "collect": "no",
    "collect_dir": "none",
    "plan": "no",
    "upload_to": "nowhere",
    "upload_bandwidth": "no limit",
    "upload_live_bandwidth": "25MB for each CPU",
    "window_iterations": "no recorder",
    "window_directory": "in the run",
    "window_post": "as many as iterations",
}
"""The meaning of settings that were not given. capd picks the values of all other settings by itself."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Show the settings in effect and where each comes from, or check them."""


@app.command(short_help="Print each setting with its origin.")
def show(
    config: Config = None,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Print each setting of the daemon and of the job, its value and its origin: env NAME, file PATH or default.

    A variable whose name is nearly that of a setting is named on stderr, as by `capd run` and `capd serve`.
    """
    from capd.config import load_triggers, misspelt_variables, resolve_daemon
    from capd.rules.words import condition_text

    daemon = resolve_daemon({}, path=config)
    for line in misspelt_variables():
        note(line)
    values = {
        name: {"value": value, "origin": daemon.origins[name]}
        for name, value in daemon.settings.model_dump(mode="json").items()
    }
    for name, value in _chosen(daemon.settings).items():
        values[name]["chosen"] = value
    job = _job_values(daemon.path)
    retention = _retention_values(daemon.path)
    rules = {rule.name: condition_text(rule) for rule in load_triggers(path=daemon.path)}
    file = None if daemon.path is None else str(daemon.path)
    lines = [
        f"file: {file or 'none'}",
        *("", "daemon (capd serve, capd run)", *_table(values, wide)),
        *("", "retention (capd serve, once an hour; capd prune)", *_table(retention, wide)),
        *(
            ("", "rules (capd serve; `capd rules check` has them in words)", *_rule_lines(rules))
            if rules
            else ()
        ),
        *("", "job (capd_client, in the training process)", *_table(job, wide)),
    ]
    found = {"file": file, "daemon": values, "retention": retention, "rules": rules, "job": job}
    print_either(found, lines, as_json=as_json)


@app.command(short_help="Print the settings that cannot be used.")
def check(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="Settings file [default: CAPD_CONFIG, or ./capd.toml if it exists]."
        ),
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print the problems as a JSON list.")] = False,
) -> None:
    """Print every setting in the file and in CAPD_* variables that cannot be used, a line each.

    `capd plan` finds what only a model shows, such as a rule that matches nothing.

    \b
    Exit codes:
      2  there is such a setting
    """
    from capd.cli.jobs.settings import checked_settings
    from capd.config import config_path, load_triggers, misspelt_variables, read_file
    from capd.errors import CapdError

    path = config_path(path=config)
    problems = [] if path is None else read_file(path)[1]
    if not problems:
        environ = dict(os.environ) if path is None else {**os.environ, "CAPD_CONFIG": str(path)}
        for resolve in (
            lambda: _check_daemon(path),
            lambda: load_triggers(path=path),
            lambda: checked_settings(environ),
        ):
            try:
                resolve()
            except CapdError as error:
                problems.append(str(error))
    problems += misspelt_variables()
    right = [f"{path or 'the environment'}: nothing wrong"]
    print_either(problems, problems or right, as_json=as_json)
    if problems:
        raise typer.Exit(2)


def _check_daemon(path: Path | None) -> None:
    from capd.config import resolve_daemon
    from capd.window.place import check_place

    settings = resolve_daemon({}, path=path).settings
    if (window := settings.window) is not None:
        check_place(window, settings.store, settings.keep_free)


def _rule_lines(rules: Mapping[str, str]) -> list[str]:
    return [f"  {name}  {printable(condition)}" for name, condition in rules.items()]


def _chosen(settings: Any) -> dict[str, Any]:
    """Return the values that capd picks for settings that were not given."""
    from capd.server.limits import encode_threads
    from capd.server.net.endpoint import default_path

    found: dict[str, Any] = {}
    if settings.endpoint is None:
        found["endpoint"] = f"unix:{default_path()}"
    if settings.threads is None:
        found["threads"] = encode_threads()
    if (window := settings.window) is not None and window.memory_nbytes is None:
        from capd.window.place import memory_limit

        found["window_memory"] = memory_limit(window)
    return found


def _retention_values(path: Path | None) -> dict[str, dict[str, Any]]:
    from capd.config import load_retention

    settings = load_retention(path=path)
    return {
        name: {"value": value, "origin": f"file {path}" if name in settings.model_fields_set else "default"}
        for name, value in settings.model_dump(mode="json").items()
    }


def _job_values(path: Path | None) -> dict[str, dict[str, Any]]:
    from capd_client.config.settings import load_config

    environ = dict(os.environ) if path is None else {**os.environ, "CAPD_CONFIG": str(path)}
    resolved = load_config(environ)
    values = {
        field.name: {"value": getattr(resolved, field.name), "origin": resolved.origins[field.name]}
        for field in fields(resolved)
        if field.name in resolved.origins
    }
    values["rules"]["value"] = msgspec.to_builtins(resolved.rules)
    if not resolved.enabled:
        values["endpoint"]["chosen"] = "off"
    elif resolved.embedded is not None:
        values["endpoint"]["chosen"] = "a daemon of the job's own"
    return values


def _table(values: Mapping[str, dict[str, Any]], wide: bool) -> list[str]:
    rows = [("  " + name, _text(name, found), found["origin"]) for name, found in values.items()]
    return TextTables(("value", "origin"), wide=wide)(("  setting", "value", "origin"), rows)


def _text(name: str, found: dict[str, Any]) -> str:
    value = found["value"]
    if value is None:
        return f"({found.get('chosen') or _UNSET.get(name, 'automatic')})"
    if name == "rules":
        return ", ".join(rule["name"] for rule in value) or f"({_UNSET[name]})"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "(none)"
    return str(value).lower() if isinstance(value, bool) else str(value)
