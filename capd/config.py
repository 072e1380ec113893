"""Settings of the daemon, each value with its origin.

Order: flag > environment > capd.toml > default. The file is the one given by `--config`, else by
CAPD_CONFIG, else `./capd.toml` if there is one. Its `[daemon]` table belongs to the daemon; its other keys
belong to the training job, which reads the same file (`capd_client.config.settings`). Every daemon setting is also the
environment variable `CAPD_<FIELD IN CAPITALS>`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from capd.errors import ConfigError
from capd.job_settings import problems_of as job_problems_of
from capd_client.config.file import read_toml
from capd_client.config.settings import VARIABLES
from capd_client.config.sizes import parse_amount, parse_size
from capd_client.config.values import store_root

__all__ = [
    "DaemonSettings", "Resolved", "config_path", "load_daemon_settings", "misspelt_variables",
    "read_daemon_table", "read_file", "resolve_daemon",
]  # fmt: skip

CONFIG_NAME = "capd.toml"


def _parse_endpoint(value: object) -> object:
    if isinstance(value, str) and not value.startswith("unix:"):
        raise ValueError(f"{value!r} is not an endpoint; write unix:/path/to/capd.sock")
    return value


def _parse_uids(value: object) -> object:
    return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _checked_codec(value: str) -> str:
    if value not in ("auto", "default", "fast", "none"):
        from capd.store.format.codecs import parse_codec  # numcodecs is slow to import

        try:
            parse_codec(value)
        except ConfigError as error:
            raise ValueError(str(error)) from error
    return value


Amount = Annotated[int | float, BeforeValidator(parse_amount)]
Nbytes = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
Uid = Annotated[int, Field(ge=0, lt=2**32 - 1)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class DaemonSettings(_Settings):
    """What `capd serve` can be told; `capd config show` prints each value with its origin."""

    store: Annotated[Path, Field(strict=False)] = Path("captures")
    """Directory that holds the runs."""
    endpoint: Annotated[str | None, BeforeValidator(_parse_endpoint)] = None
    """unix:PATH of the socket; none: $XDG_RUNTIME_DIR/capd/capd.sock, else <tmp>/capd-<uid>/capd.sock."""
    run_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Name of the run for ranks that bring none; none: assigned by the daemon."""
    node: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")] | None = None
    """Name of this node in the store; none: the host name."""
    threads: Annotated[int, Field(ge=1, le=256)] | None = None
    """Encode threads; none: a quarter of the usable CPUs, at least 1, at most 16."""
    staging_bytes: Nbytes = 256 << 20
    """Memory for captures between the arenas and the disk."""
    max_disk: Amount | None = None
    """Bytes this daemon may add, or share of the file system; none: min(200 GB, half of the free space)."""
    keep_free: Amount = 0.1
    """Bytes, or share of the file system, that are left free."""
    allow_uid: Annotated[tuple[Uid, ...], BeforeValidator(_parse_uids)] = ()
    """Further user ids whose ranks may connect; the daemon's own always may."""
    durability: Literal["buffered", "durable"] = "buffered"
    """buffered: acknowledged records survive SIGKILL. durable: also power loss."""
    codec: Annotated[str, AfterValidator(_checked_codec)] = "auto"
    """Codec of new series: auto (the best of a few, tried on a series' first record), default, fast, none, or an
    explicit one such as zstd:3 or blosc:zstd:1:shuffle:1048576."""
    statistics: bool = True
    """Compute statistics of every tensor; those of captures that keep nothing else are computed in any case."""
    idle_seal_s: Seconds = 10.0
    """A run is sealed when its last session has been gone this long."""
    shutdown_timeout_s: Seconds = 30.0
    """Time to drain and seal at shutdown; what is left stays recoverable."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """Daemon settings, the origin of each ("flag", "env NAME", "file PATH", "default"), and the file read."""

    settings: DaemonSettings
    origins: dict[str, str]
    path: Path | None


def config_path(environ: Mapping[str, str] = os.environ, path: Path | None = None) -> Path | None:
    """The capd.toml that counts: `path`, else $CAPD_CONFIG, else ./capd.toml if it exists, else none."""
    if path is not None:
        return path
    if environ.get("CAPD_CONFIG"):
        return Path(environ["CAPD_CONFIG"])
    return Path(CONFIG_NAME) if Path(CONFIG_NAME).is_file() else None


def read_daemon_table(path: Path) -> dict[str, Any]:
    """The `[daemon]` table of a capd.toml, every key of the file checked.

    Raises ConfigError, naming file and key, when the file is missing, is no TOML, or holds an unknown key.
    """
    table, problems = read_file(path)
    if problems:
        more = f" (and {len(problems) - 1} more; `capd config check` lists them)" if len(problems) > 1 else ""
        raise ConfigError(problems[0] + more)
    daemon: dict[str, Any] = table.get("daemon", {})
    return daemon


def read_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """A whole capd.toml, and a sentence, naming file and key, for each thing in it that cannot be used.

    Raises ConfigError where it is missing, cannot be read, or is no TOML.
    """
    try:
        table = read_toml(str(path))
    except FileNotFoundError:
        raise ConfigError(f"the configuration file {path} does not exist") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    problems = job_problems_of(table)
    if isinstance(table.get("daemon", {}), dict):
        problems += _problems_of(DaemonSettings, table.get("daemon", {}), "[daemon] {}".format)
    return table, [f"{path}: {problem}" for problem in problems]


def resolve_daemon(
    flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, path: Path | None = None
) -> Resolved:
    """Resolve every daemon setting; a flag of None (or an empty list) counts as not given.

    Raises ConfigError that names the setting, its origin and what is accepted.
    """
    file = config_path(environ, path)
    table = read_daemon_table(file) if file else {}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for field in DaemonSettings.model_fields:
        flag = flags.get(field)
        variable, text = _from_environment(field, environ)
        if flag is not None and flag != [] and flag != ():
            values[field], origins[field] = flag, "flag"
        elif text is not None:
            values[field], origins[field] = text, f"env {variable}"
        elif field in table:
            values[field], origins[field] = table[field], f"file {file}"
        else:
            origins[field] = "default"
    settings = _validate(DaemonSettings, values, lambda field: _blame(field, origins))
    return Resolved(settings, origins, file)


def load_daemon_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, path: Path | None = None
) -> DaemonSettings:
    """`resolve_daemon` for callers that need only the values."""
    return resolve_daemon(flags, environ, path).settings


def misspelt_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """A line for each variable that is nearly the name of a setting, and so sets nothing."""
    known = VARIABLES.union(f"CAPD_{field.upper()}" for field in DaemonSettings.model_fields)
    strange = sorted(name for name in environ if name.startswith("CAPD_") and name not in known)
    near = ((name, difflib.get_close_matches(name, known, n=1, cutoff=0.8)) for name in strange)
    return [
        f"{name} is no setting and has no effect; did you mean {found[0]}?" for name, found in near if found
    ]


_SEED_NAMES = {"store": "TENSOR_SAVE_DIR"}  # tensor_saver's name, read after capd's own


def _from_environment(field: str, environ: Mapping[str, str]) -> tuple[str, str | None]:
    for variable in (f"CAPD_{field.upper()}", _SEED_NAMES.get(field, "")):
        text = environ.get(variable)
        # CAPD_ENDPOINT=off speaks to the job only.
        if text and (field, text.strip().lower()) != ("endpoint", "off"):
            return variable, store_root(text) if variable == "TENSOR_SAVE_DIR" else text
    return "", None


def _blame(field: str, origins: Mapping[str, str]) -> str:
    origin = origins.get(field, "")
    return f"--{field.replace('_', '-')}" if origin == "flag" else f"{field} ({origin})"


_Model = TypeVar("_Model", bound=BaseModel)
_Place = Callable[[str], str]  # field name → how a message names it and where it stands


def _validate(model: type[_Model], values: Mapping[str, Any], place: _Place) -> _Model:
    problems = _problems_of(model, values, place)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(problems[0] + more)
    return model.model_validate(values)


def _problems_of(model: type[BaseModel], values: Mapping[str, Any], place: _Place) -> list[str]:
    try:
        model.model_validate(values)
    except ValidationError as error:
        return [_one_line(model, entry, place) for entry in error.errors(include_url=False)]
    return []


def _one_line(model: type[BaseModel], error: ErrorDetails, place: _Place) -> str:
    field = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] != "extra_forbidden":
        message = error["msg"].removeprefix("Value error, ")
        shown = "" if repr(error["input"]) in message else f", got {error['input']!r}"
        return f"{place(field)}: {message}{shown}"
    near = difflib.get_close_matches(field, model.model_fields, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(model.model_fields)}"
    return f"{place(field)}: unknown key; {hint}"
