"""Reads capd.toml for the client: the layout, unknown keys refused, the daemon's table ignored.

Top level: quant_type, policy, mode, watch, slice, max_block_ms, arena_bytes, max_mb_per_step, max_d2h_gbps,
exit_timeout_s. Table [when]: steps, micro_batches, ranks. Table [daemon] belongs to `capd serve` and is not looked
into here.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any, Optional, Union

import msgspec

from capd_client.errors import ConfigError

__all__ = ["FileSettings", "WhenSettings", "read_settings_file"]

MAX_FILE_NBYTES = 1 << 20

_RangeText = Union[str, int]


class WhenSettings(msgspec.Struct, forbid_unknown_fields=True):
    """Table [when]: which steps, micro-batches and ranks `watch` captures."""

    steps: Optional[_RangeText] = None
    micro_batches: Optional[_RangeText] = None
    ranks: Optional[_RangeText] = None


class FileSettings(msgspec.Struct, forbid_unknown_fields=True):
    """capd.toml as the client sees it."""

    quant_type: Optional[str] = None
    policy: Optional[str] = None
    mode: Optional[str] = None
    watch: Optional[str] = None
    slice: Optional[str] = None
    max_block_ms: Union[int, float, None] = None
    arena_bytes: Union[int, str, None] = None
    max_mb_per_step: Union[int, float, str, None] = None
    max_d2h_gbps: Union[int, float, str, None] = None
    exit_timeout_s: Union[int, float, None] = None
    when: WhenSettings = msgspec.field(default_factory=WhenSettings)
    daemon: dict[str, Any] = {}


def read_settings_file(path: str, *, must_exist: bool) -> tuple[Mapping[str, Any], Optional[str]]:
    """Values by dotted key ("policy", "when.steps") and the absolute path read.

    ({}, None) when the file is absent and need not exist. Raises ConfigError when it is absent but was named,
    cannot be read or parsed, holds unknown keys or wrong types, or this Python has no TOML reader.
    """
    path = os.path.abspath(os.path.expanduser(path))
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_NBYTES + 1)
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"CAPD_CONFIG names {path}, which does not exist") from None
        return {}, None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > MAX_FILE_NBYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_NBYTES} bytes; is it a capd.toml?")
    settings = _convert(_parse(content, path), path)
    values: dict[str, Any] = {}
    for name in FileSettings.__struct_fields__:
        value = getattr(settings, name)
        if name not in {"when", "daemon"} and value is not None:
            values[name] = value
    for name in WhenSettings.__struct_fields__:
        value = getattr(settings.when, name)
        if value is not None:
            values[f"when.{name}"] = value
    return values, path


def _parse(content: bytes, path: str) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:
        raise ConfigError(
            f"{path} is ignored: Python before 3.11 has no TOML reader; use the CAPD_* environment variables"
        ) from None
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _convert(table: dict[str, Any], path: str) -> FileSettings:
    for where, names, fields in (
        ("", table, FileSettings.__struct_fields__),
        ("when.", table.get("when", {}), WhenSettings.__struct_fields__),
    ):
        for name in names if isinstance(names, dict) else ():
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1)
                hint = f"; did you mean {where}{near[0]}?" if near else f"; known: {', '.join(fields)}"
                raise ConfigError(f"{path}: unknown setting {where}{name}{hint}")
    try:
        return msgspec.convert(table, FileSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
