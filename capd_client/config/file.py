"""Reads capd.toml for the client: checks its layout, refuses unknown keys, and ignores the daemon's tables.

Top level: quant_type, policy, mode, watch, slice, max_block_ms, arena_bytes, max_mb_per_step, max_d2h_gbps,
ring_bytes, piece_bytes, snapshot, ring, exit_timeout_s. Table [when]: steps, micro_batches, ranks. Tables [[rule]]:
see `capd_client.rules.schema`. Tables [daemon], [quota], [upload], [lab], [window], [retention] and [[trigger]]
belong to `capd serve`; this module does not read them. A file of rules alone has only [[rule]].
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Optional, Union

import msgspec

from capd_client.errors import ConfigError
from capd_client.rules.schema import (
    RangeText,
    RuleSettings,
    WholeNumber,
    check_fields,
    check_rule_fields,
    check_rules,
    parse_rules,
)

__all__ = [
    "FileSettings",
    "WhenSettings",
    "parse_settings",
    "read_rules_file",
    "read_settings_file",
    "read_toml",
]

MAX_FILE_NBYTES = 1 << 20


class WhenSettings(msgspec.Struct, forbid_unknown_fields=True):
    """Table [when]: the steps, micro-batches and ranks that `watch` captures."""

    steps: Optional[RangeText] = None
    micro_batches: Optional[RangeText] = None
    ranks: Optional[RangeText] = None


class FileSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The client's view of capd.toml."""

    quant_type: Optional[str] = None
    policy: Optional[str] = None
    mode: Optional[str] = None
    watch: Optional[str] = None
    slice: Optional[str] = None
    max_block_ms: Union[WholeNumber, float, None] = None
    arena_bytes: Union[WholeNumber, str, None] = None
    max_mb_per_step: Union[WholeNumber, float, str, None] = None
    max_d2h_gbps: Union[WholeNumber, float, str, None] = None
    ring_bytes: Union[WholeNumber, str, None] = None
    piece_bytes: Union[WholeNumber, str, None] = None
    snapshot: Optional[str] = None
    ring: Optional[str] = None
    exit_timeout_s: Union[WholeNumber, float, None] = None
    when: WhenSettings = msgspec.field(default_factory=WhenSettings)
    rule: list[RuleSettings] = []
    daemon: dict[str, Any] = {}
    retention: dict[str, Any] = {}
    quota: dict[str, Any] = {}
    upload: dict[str, Any] = {}
    trigger: list[dict[str, Any]] = []
    lab: dict[str, Any] = {}
    window: dict[str, Any] = {}


def read_settings_file(path: str, *, must_exist: bool) -> tuple[Mapping[str, Any], Optional[str]]:
    """Read and check capd.toml.

    Returns:
        The values by dotted key ("policy", "when.steps", "rule"), and the absolute path of the file. ({}, None) if the
        file is absent and need not exist.

    Raises:
        ConfigError: The file must exist but is absent, cannot be read or parsed, holds unknown keys, wrong types or
            invalid rules; or this Python reads no TOML.
    """
    path = os.path.abspath(os.path.expanduser(path))
    try:
        return parse_settings(read_toml(path)), path
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"CAPD_CONFIG names {path}, which does not exist") from None
        return {}, None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_rules_file(path: str) -> tuple[RuleSettings, ...]:
    """Return the rules of a file that holds only rules. Raises ConfigError, naming the file, for any other file."""
    path = os.path.abspath(os.path.expanduser(path))
    try:
        table = read_toml(path)
        check_fields(table, ("rule",), " in a file of rules alone")
        rules = table.get("rule")
        if not isinstance(rules, list) or not rules:
            raise ConfigError("it has no [[rule]]")
        return parse_rules(rules)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_settings(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a whole document by dotted key. Raises ConfigError for unknown keys and invalid values."""
    check_fields(table, FileSettings.__struct_fields__)
    when, rules = table.get("when"), table.get("rule")
    if isinstance(when, dict):
        check_fields(when, WhenSettings.__struct_fields__, prefix="when.")
    if isinstance(rules, list):
        check_rule_fields(rules)
    try:
        settings = msgspec.convert(table, FileSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None
    values = {name: getattr(settings, name) for name in FileSettings.__struct_fields__}
    del (
        values["when"],
        values["daemon"],
        values["quota"],
        values["upload"],
        values["lab"],
        values["window"],
        values["retention"],
    )
    del values["trigger"]
    values["rule"] = check_rules(settings.rule) or None
    values |= {f"when.{name}": getattr(settings.when, name) for name in WhenSettings.__struct_fields__}
    return {name: value for name, value in values.items() if value is not None}


def read_toml(path: str) -> dict[str, Any]:
    """Parse the TOML document in a file.

    Raises:
        FileNotFoundError: The file is absent.
        ConfigError: The file cannot be read, is too large or is not TOML. The message does not name the path.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_NBYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_NBYTES:
        raise ConfigError(f"larger than {MAX_FILE_NBYTES} bytes; is it a capd.toml?")
    try:
        import tomllib
    except ModuleNotFoundError:
        raise ConfigError(
            "ignored, because Python before 3.11 has no TOML reader; use the CAPD_* environment variables"
        ) from None
    try:
        return tomllib.loads(content.decode("utf-8"))
    # A ValueError also comes from a number with more than 4300 digits.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not valid TOML: {error}") from None
