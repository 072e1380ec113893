"""The job's part of a capd.toml: finds all its problems, where the training job stops at the first one.

Each key is read alone by the job's own functions, so the command line refuses exactly what the job refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from capd_client.config.file import FileSettings, WhenSettings, parse_settings
from capd_client.config.settings import check_file_value
from capd_client.errors import ConfigError
from capd_client.rules.schema import RuleSettings, check_rules, rule_label, unknown_setting

__all__ = ["problems_of"]


def problems_of(table: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each problem that the training job has with the file. It ignores the daemon's tables."""
    problems: list[str] = []
    for key, value in table.items():
        if key not in FileSettings.__struct_fields__:
            problems.append(unknown_setting(key, FileSettings.__struct_fields__))
        elif key == "when" and isinstance(value, dict):
            problems += _problems_of_when(value)
        elif key == "rule" and isinstance(value, list):
            problems += _problems_of_rules(value)
        else:
            problems += _problem(_check_document, {key: value}, key)
    return problems


def _problems_of_when(table: Mapping[str, Any]) -> list[str]:
    problems: list[str] = []
    for key, value in table.items():
        if key in WhenSettings.__struct_fields__:
            problems += _problem(_check_document, {"when": {key: value}}, f"when.{key}")
        else:
            problems.append(unknown_setting(key, WhenSettings.__struct_fields__, prefix="when."))
    return problems


def _problems_of_rules(rules: list[Any]) -> list[str]:
    problems: list[str] = []
    for number, rule in enumerate(rules, 1):
        label, found = rule_label(rule, number), []
        for key, value in rule.items() if isinstance(rule, dict) else ():
            if key in RuleSettings.__struct_fields__:
                found += _problem(_check_rule, {key: value}, label)
            else:
                found.append(unknown_setting(key, RuleSettings.__struct_fields__, f" in {label}"))
        # Values that are right alone may contradict each other.
        problems += found or _problem(_check_rule, rule, label)
    return problems or _problem(
        lambda all_: check_rules(msgspec.convert(all_, list[RuleSettings])), rules, ""
    )


def _check_document(document: Mapping[str, Any]) -> None:
    for key, value in parse_settings(document).items():
        check_file_value(key, value)


def _check_rule(rule: Any) -> None:
    msgspec.convert(rule, RuleSettings).check()


def _problem(check: Callable[[Any], object], value: Any, place: str) -> list[str]:
    """Return what is wrong with a value, with its place, if there is something."""
    try:
        check(value)
    except (ConfigError, msgspec.ValidationError) as error:
        # msgspec says "Expected `int`, got `str` - at `$.field`".
        what, _, where = str(error).partition(" - at `$")
        field = where.strip(".`") if check is _check_rule else ""
        return [": ".join(part for part in (place, field, what) if part)]
    return []
