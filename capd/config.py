"""The settings of the daemon, each value with its origin.

The order is flag > environment > capd.toml > default. The file is named by `--config`, else by CAPD_CONFIG. Otherwise
`./capd.toml` is used if it exists. Its tables `[daemon]`, `[quota]`, `[upload]`, `[lab]`, `[window]`, `[retention]` and
`[[trigger]]` belong to the daemon. Its other keys belong to the training job, which reads the same file
(`capd_client.config.settings`). Every daemon setting is also the environment variable `CAPD_<FIELD IN CAPITALS>`.
`[retention]` and `[[trigger]]` are read from the file alone.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails

from capd.errors import CapdError, ConfigError
from capd.job_settings import problems_of as job_problems_of
from capd.lifecycle.policy import Policy, parse_age
from capd.window.settings import (
    DEFAULT_WINDOW_NBYTES,
    MAX_WINDOW_ITERATIONS,
    MIN_WINDOW_NBYTES,
    WindowSettings,
    check_memory,
)
from capd_client.config.file import read_toml
from capd_client.config.settings import VARIABLES
from capd_client.config.sizes import parse_amount, parse_size
from capd_client.config.values import store_root

if TYPE_CHECKING:
    from capd.rules.schema import TriggerSettings
    from capd.store.upload.move_policy import MovePolicy

__all__ = [
    "DaemonSettings", "Resolved", "RetentionSettings", "config_path", "load_daemon_settings", "load_retention",
    "load_triggers", "misspelt_variables", "read_daemon_table", "read_file", "resolve_daemon",
]  # fmt: skip

CONFIG_NAME = "capd.toml"
# HOST is a name, an IPv4 address, or an IPv6 address in brackets.
_METRICS = re.compile(
    r"off|unix:[^\0]+"
    r"|(\[[0-9A-Fa-f:.]+(%\w+)?\]|[A-Za-z0-9._-]*):(\d{1,4}|[1-5]\d{4}|6([0-4]\d{3}|5([0-4]\d\d|5([0-2]\d|3[0-5]))))"
)

_AT = re.compile(r"at:([1-9]\d?|100)%")


def _parse_endpoint(value: object) -> object:
    if isinstance(value, str) and not value.startswith("unix:"):
        raise ValueError(f"{value!r} is not an endpoint; write unix:/path/to/capd.sock")
    return value


def _parse_uids(value: object) -> object:
    return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _parse_metrics(value: object) -> object:
    if isinstance(value, str) and not _METRICS.fullmatch(value):
        raise ValueError(
            f"{value!r} is no address for metrics; write unix:/path/to/metrics.sock, 127.0.0.1:9464 or off"
        )
    return value


def _checked_codec(value: str) -> str:
    if value not in ("auto", "default", "fast", "none"):
        # Importing numcodecs is slow.
        from capd.store.format.codecs import parse_codec

        try:
            parse_codec(value)
        except ConfigError as error:
            raise ValueError(str(error)) from error
    return value


def _parse_upload_to(value: object) -> object:
    if not isinstance(value, str):
        return value
    # `capd --help` and jobs need no object store.
    from capd.store.objects.address import parse_address

    try:
        address = parse_address(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if address.is_run:
        raise ValueError(
            f"{str(address)!r} is the address of a run; write the one above it: {str(address.parent)!r}"
        )
    return str(address)


def _parse_eviction(value: object) -> object:
    if isinstance(value, str) and value != "never" and not _AT.fullmatch(value):
        if not value.startswith("after:"):
            raise ValueError(
                f"{value!r} is none of never, after:TIME such as after:1h, and at:PERCENT such as at:85%"
            )
        parse_age(value.removeprefix("after:"))
    return value


# Each format takes memory and time of every record.
_MOST_FORMATS = 16
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d+)?)\s*%")


def _parse_formats(value: object) -> object:
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
        raise ValueError('write a list of formats, such as ["mxfp8", "nvfp4:16x16"]')
    # Without [lab], nothing of it is imported.
    from capd.analyze.format_choice import choices

    named = [word.strip() for word in words if word.strip()]
    if named:
        try:
            named = [choice.label for choice in choices(",".join(named))]
        except CapdError as error:
            raise ValueError(str(error)) from error
    if len(named) > _MOST_FORMATS:
        raise ValueError(f"{len(named)} formats are more than the {_MOST_FORMATS} that may be measured")
    return tuple(named)


def _checked_sample(value: str) -> str:
    from capd.lab.sampling import parse_sample

    parse_sample(value)
    return value


def _parse_share(value: object) -> object:
    found = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is not None:
        value = float(found[1]) / 100
    elif isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{value!r} is no share of a CPU; write a percentage, such as 20%") from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.001 <= value <= 1:
        raise ValueError("a share of one CPU is from 0.1% to 100%")
    return float(value)


Amount = Annotated[int | float, BeforeValidator(parse_amount)]
Age = Annotated[float, BeforeValidator(parse_age)]
Nbytes = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
Uid = Annotated[int, Field(ge=0, lt=2**32 - 1)]


# What a table may lack, because a variable may give it. All settings together are checked again.
_GIVEN_ELSEWHERE: Mapping[str, Mapping[str, Any]] = {"window": {"window_iterations": 1}}
# The settings of [window] beside iterations.
_WINDOW_REST = ("window_bytes", "window_memory", "window_directory", "window_post", "window_statistics")


class DaemonSettings(BaseModel):
    """The settings of `capd serve`. `capd config show` prints each value with its origin."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: Annotated[Path, Field(strict=False)] = Path("captures")
    """Directory that holds the runs."""
    endpoint: Annotated[str | None, BeforeValidator(_parse_endpoint)] = None
    """unix:PATH of the socket; none: $XDG_RUNTIME_DIR/capd/capd.sock, else <tmp>/capd-<uid>/capd.sock."""
    run_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Name of the run for ranks without a run name; none: assigned by the daemon."""
    node: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")] | None = None
    """Name of this node in the store; none: the host name."""
    threads: Annotated[int, Field(ge=1, le=256)] | None = None
    """Encode threads; none: a quarter of the usable CPUs, at least 1, at most 16."""
    staging_bytes: Nbytes = 256 << 20
    """Memory for captures between the arenas and the disk."""
    max_disk: Amount | None = None
    """Bytes that this daemon may add, or share of the file system; none: min(200 GB, half of the free space)."""
    keep_free: Amount = 0.1
    """Bytes, or share of the file system, to leave free."""
    allow_uid: Annotated[tuple[Uid, ...], BeforeValidator(_parse_uids)] = ()
    """Further user ids whose ranks may connect; ranks of the daemon's own user always may."""
    durability: Literal["buffered", "durable"] = "buffered"
    """buffered: acknowledged records survive SIGKILL. durable: also power loss."""
    codec: Annotated[str, AfterValidator(_checked_codec)] = "auto"
    """Codec of new series: auto (the best of a few, tried on a series' first record), default, fast, none, or an
    explicit one such as zstd:3 or blosc:zstd:1:shuffle:1048576."""
    run_max: Nbytes | None = None
    """Bytes that each run may take on this node, over all daemons; none: no limit."""
    rank_max: Nbytes | None = None
    """Bytes that each rank of a run may take; none: no limit."""
    series_max: Nbytes | None = None
    """Bytes that each series of a run may take; none: no limit."""
    quota_policy: Literal["stats", "drop"] = "stats"
    """stats: from 90 % of a quota on only statistics are kept. drop: tensors are kept until a quota is used up."""
    statistics: bool = True
    """Compute statistics of every tensor; captures that keep only statistics get them in any case."""
    idle_seal_s: Seconds = 10.0
    """Seconds after the end of the last session at which a run is sealed."""
    shutdown_timeout_s: Seconds = 30.0
    """Time to drain and seal at shutdown; unsealed records stay recoverable."""
    metrics: Annotated[str, BeforeValidator(_parse_metrics)] = "off"
    """unix:PATH or HOST:PORT that serves /metrics and /healthz, or off."""
    metrics_token_file: Annotated[Path, Field(strict=False)] | None = None
    """File with the token that /metrics demands; a HOST that is not loopback needs one."""
    metrics_file: Annotated[Path, Field(strict=False)] | None = None
    """File in .prom for the textfile collector of node_exporter, replaced every 15 s."""
    metrics_ranks: bool = False
    """Metrics of each rank, too: as many series more as there are ranks."""
    log_format: Literal["text", "json"] = "text"
    """text: lines for people. json: one JSON object a line."""
    upload_to: Annotated[str | None, BeforeValidator(_parse_upload_to)] = None
    """s3://BUCKET/PREFIX (or gs://, az://, file:///) to which the runs of the store are uploaded; none: nowhere."""
    upload_runs: Annotated[str, Field(min_length=1, max_length=1024)] = "*"
    """The runs that are uploaded, as a pattern of their ids such as "exp7*"."""
    upload_threads: Annotated[int, Field(ge=1, le=64)] = 4
    """Objects that are uploaded at a time."""
    upload_bandwidth: Annotated[Nbytes, Field(ge=1024)] | None = None
    """Bytes per second of all uploads together; none: no limit."""
    upload_live_bandwidth: Annotated[Nbytes, Field(ge=1024)] | None = None
    """The same while ranks are there, so that uploads give way to them; none: 25 MB for each CPU."""
    upload_delete_local: Annotated[str, BeforeValidator(_parse_eviction)] = "never"
    """When local shards that are in the object store are deleted: never, after:TIME (after:1h) or at:PERCENT of the
    file system (at:85%)."""
    upload_drain_s: Seconds = 0.0
    """Seconds that a stopping daemon may go on uploading."""
    lab_formats: Annotated[tuple[str, ...], BeforeValidator(_parse_formats)] = ()
    """Formats whose errors on a sample of the records are measured while capturing; none: nothing is measured."""
    lab_sample: Annotated[str, AfterValidator(_checked_sample)] = "1/8"
    """Share of the calls that are measured, as 1/N: those with (iteration + micro_batch + call) mod N = 0."""
    lab_cpu: Annotated[float, BeforeValidator(_parse_share)] = 0.2
    """Share of one CPU that measuring may take, such as 20%."""
    window_iterations: Annotated[int, Field(ge=1, le=MAX_WINDOW_ITERATIONS)] | None = None
    """Newest iterations whose tensors the flight recorder holds; none: there is no recorder, all are stored."""
    window_bytes: Annotated[Nbytes, Field(ge=MIN_WINDOW_NBYTES)] = DEFAULT_WINDOW_NBYTES
    """Bytes that the recorder may hold, in memory and on disk together."""
    window_memory: Nbytes | None = None
    """The part of them in memory; none: 5 % of the node's memory, at most half of what is free in /dev/shm."""
    window_directory: Annotated[Path, Field(strict=False)] | None = None
    """Directory of the part on disk; none: inside the run."""
    window_post: Annotated[int, Field(ge=0, le=MAX_WINDOW_ITERATIONS)] | None = None
    """Iterations that are kept after the one that a keep names; none: as many as iterations."""
    window_statistics: bool = False
    """Whether a record that leaves the recorder is stored as its statistics, instead of being let go."""

    @field_validator(*_WINDOW_REST)
    @classmethod
    def _checked_window(cls, value: Any, info: ValidationInfo) -> Any:
        # Defaults are not validated, so this value was given.
        if info.data.get("window_iterations", ...) is None and value is not None:
            raise ValueError("it needs iterations, the number of iterations to hold; write iterations = 8")
        if info.field_name == "window_memory" and value is not None:
            check_memory(value, info.data.get("window_bytes", value))
        return value

    @property
    def window(self) -> WindowSettings | None:
        """The settings of the flight recorder; None without one."""
        if self.window_iterations is None:
            return None
        return WindowSettings(
            iterations=self.window_iterations,
            nbytes=self.window_bytes,
            memory_nbytes=self.window_memory,
            directory=None
            if self.window_directory is None
            else self.window_directory.expanduser().absolute(),
            post=self.window_post,
            statistics=self.window_statistics,
        )

    @property
    def move_policy(self) -> MovePolicy:
        """When uploaded shards leave this disk."""
        from capd.store.upload.move_policy import MovePolicy

        kind, _, value = self.upload_delete_local.partition(":")
        if kind == "after":
            return MovePolicy(after_s=parse_age(value))
        return MovePolicy(at=int(value.removesuffix("%")) / 100) if kind == "at" else MovePolicy()

    def uploads(self, run: Path) -> bool:
        """Return whether a run is one of those that the daemon of this store uploads."""
        is_here = run.absolute().parent == self.store.absolute()
        return self.upload_to is not None and is_here and fnmatchcase(run.stem, self.upload_runs)


class RetentionSettings(BaseModel):
    """The table [retention]: the runs that stay. Without any key, no run is ever removed by itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep_last: Annotated[int, Field(ge=1, strict=True)] | None = None
    """Number of newest runs that stay."""
    keep_within: Age | None = None
    """Age of a run's last change up to which it stays, such as "30d"."""
    max_size: Annotated[Nbytes, Field(gt=0)] | None = None
    """Bytes that all runs together may take, such as "2TB"; the oldest are removed first."""
    keep_tags: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Tags of runs that stay."""
    only_uploaded: Annotated[bool, Field(strict=True)] | None = None
    """Keep every run that is not wholly in an object store; none: true with [upload], else false."""

    def policy(self, settings: DaemonSettings) -> Policy:
        """Return the rules, beside the settings of the daemon."""
        only_uploaded = settings.upload_to is not None if self.only_uploaded is None else self.only_uploaded
        return Policy(self.keep_last, self.keep_within, self.max_size, self.keep_tags, only_uploaded)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The daemon settings, the origin of each ("flag", "env NAME", "file PATH", "default"), and the file read."""

    settings: DaemonSettings
    origins: dict[str, str]
    path: Path | None


def config_path(environ: Mapping[str, str] = os.environ, path: Path | None = None) -> Path | None:
    """Return the path of the capd.toml: `path`, else $CAPD_CONFIG, else ./capd.toml if it exists, else None."""
    if path is not None:
        return path
    if environ.get("CAPD_CONFIG"):
        return Path(environ["CAPD_CONFIG"])
    return Path(CONFIG_NAME) if Path(CONFIG_NAME).is_file() else None


def read_daemon_table(path: Path) -> dict[str, Any]:
    """Check every key of a capd.toml and return the settings of its tables [daemon], [quota], [upload], [lab] and
    [window].

    Raises:
        ConfigError: The file is missing or not TOML, or a key is unknown or has a bad value. The message names file
            and key.
    """
    table, problems = read_file(path)
    if problems:
        more = f" (and {len(problems) - 1} more; `capd config check` lists them)" if len(problems) > 1 else ""
        raise ConfigError(problems[0] + more)
    found: dict[str, Any] = dict(table.get("daemon", {}))
    for name, keys in _TABLES.items():
        found |= {keys[key]: value for key, value in table.get(name, {}).items()}
    return found


def read_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return a whole capd.toml and its problems. Each problem is a sentence that names file and key.

    Raises:
        ConfigError: The file is missing, cannot be read, or is not TOML.
    """
    try:
        table = read_toml(str(path))
    except FileNotFoundError:
        raise ConfigError(f"the configuration file {path} does not exist") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    problems = job_problems_of(table)
    if "trigger" in table:
        from capd.rules.schema import trigger_problems

        problems += trigger_problems(table["trigger"])
    for name, problems_of in _PROBLEMS.items():
        if isinstance(table.get(name, {}), dict):
            problems += problems_of(table.get(name, {}))
    return table, [f"{path}: {problem}" for problem in problems]


# Table → key → setting.
_TABLES = {
    "quota": {
        "run_max": "run_max",
        "rank_max": "rank_max",
        "series_max": "series_max",
        "policy": "quota_policy",
    },
    **{
        table: {
            name.removeprefix(f"{table}_"): name
            for name in DaemonSettings.model_fields
            if name.startswith(f"{table}_")
        }
        for table in ("upload", "lab", "window")
    },
}


def _problems_of_daemon(table: Mapping[str, Any]) -> list[str]:
    moved = {
        setting: f"[daemon] {setting}: it belongs into [{name}], as {key}"
        for name, keys in _TABLES.items()
        for key, setting in keys.items()
        if setting in table
    }
    rest = {key: value for key, value in table.items() if key not in moved}
    return [*moved.values(), *_problems_of(rest, "[daemon] {}".format)]


def _problems_of_table(name: str, table: Mapping[str, Any]) -> list[str]:
    keys = _TABLES[name]
    places = {setting: f"[{name}] {key}" for key, setting in keys.items()}
    found = [
        f"[{name}] {key}: unknown key; known keys: {', '.join(keys)}" for key in table if key not in keys
    ]
    known = {keys[key]: value for key, value in table.items() if key in keys}
    return found + _problems_of({**_GIVEN_ELSEWHERE.get(name, {}), **known}, places.__getitem__)


def resolve_daemon(
    flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, path: Path | None = None
) -> Resolved:
    """Resolve every daemon setting.

    Args:
        flags: The flags by setting. None and an empty list count as not set.
        environ: The environment.
        path: The configuration file that `--config` names.

    Raises:
        ConfigError: A value is not accepted. The message names the setting, its origin and the accepted values.
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
    problems = _problems_of(values, lambda field: _blame(field, origins))
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(problems[0] + more)
    return Resolved(DaemonSettings.model_validate(values), origins, file)


def load_retention(environ: Mapping[str, str] = os.environ, path: Path | None = None) -> RetentionSettings:
    """Return the table [retention] of the capd.toml in effect; empty without one.

    Raises:
        ConfigError: A key of the file is unknown or has a bad value.
    """
    file = config_path(environ, path)
    if file is None:
        return RetentionSettings()
    read_daemon_table(file)
    return RetentionSettings.model_validate(read_file(file)[0].get("retention", {}))


def load_triggers(
    environ: Mapping[str, str] = os.environ, path: Path | None = None
) -> Sequence[TriggerSettings]:
    """Return the tables [[trigger]] of the capd.toml in effect; empty without any.

    Raises:
        ConfigError: A key of the file is unknown or has a bad value, or the daemon cannot do what a rule asks.
    """
    file = config_path(environ, path)
    if file is None:
        return ()
    read_daemon_table(file)
    tables = read_file(file)[0].get("trigger", ())
    if not tables:
        return ()
    # A daemon without rules does not need them.
    from capd.rules.refusals import refusals
    from capd.rules.schema import parse_triggers

    rules = parse_triggers(tables)
    settings = load_daemon_settings({}, environ, path)
    if problems := refusals(
        rules,
        statistics=settings.statistics,
        keeps=settings.window is not None,
        lab_formats=settings.lab_formats,
    ):
        raise ConfigError(f"{file}: {problems[0]}")
    return rules


def load_daemon_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, path: Path | None = None
) -> DaemonSettings:
    """Resolve every daemon setting as `resolve_daemon` does, and return only the values."""
    return resolve_daemon(flags, environ, path).settings


def misspelt_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a line for each variable that is nearly the name of a setting and therefore has no effect."""
    known = VARIABLES.union(f"CAPD_{field.upper()}" for field in DaemonSettings.model_fields)
    strange = sorted(name for name in environ if name.startswith("CAPD_") and name not in known)
    near = ((name, difflib.get_close_matches(name, known, n=1, cutoff=0.8)) for name in strange)
    return [
        f"{name} is not a setting and has no effect; did you mean {found[0]}?"
        for name, found in near
        if found
    ]


# The name in tensor_saver, which is read after capd's own name.
_TENSOR_SAVER_NAMES = {"store": "TENSOR_SAVE_DIR"}


def _from_environment(field: str, environ: Mapping[str, str]) -> tuple[str, str | None]:
    for variable in (f"CAPD_{field.upper()}", _TENSOR_SAVER_NAMES.get(field, "")):
        text = environ.get(variable)
        # CAPD_ENDPOINT=off is meant for the job only.
        if text and (field, text.strip().lower()) != ("endpoint", "off"):
            return variable, store_root(text) if variable == "TENSOR_SAVE_DIR" else text
    return "", None


# Flags with another name than their setting.
_FLAGS = {"upload_drain_s": "--drain-uploads"}


def _blame(field: str, origins: Mapping[str, str]) -> str:
    origin = origins.get(field, "")
    flag = _FLAGS.get(field, f"--{field.replace('_', '-')}")
    return flag if origin == "flag" else f"{field} ({origin})"


def _problems_of_retention(table: Mapping[str, Any]) -> list[str]:
    return _problems_of(table, "[retention] {}".format, RetentionSettings)


def _problems_of(
    values: Mapping[str, Any], place: Callable[[str], str], model: type[BaseModel] = DaemonSettings
) -> list[str]:
    """Return one sentence for each value that cannot be used. `place` turns a field's name into its place."""
    try:
        model.model_validate(values)
    except ValidationError as error:
        return [_one_line(entry, place, model) for entry in error.errors(include_url=False)]
    return []


# Table of capd.toml → what finds its problems.
_PROBLEMS: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "daemon": _problems_of_daemon,
    "quota": partial(_problems_of_table, "quota"),
    "upload": partial(_problems_of_table, "upload"),
    "lab": partial(_problems_of_table, "lab"),
    "window": partial(_problems_of_table, "window"),
    "retention": _problems_of_retention,
}


def _one_line(error: ErrorDetails, place: Callable[[str], str], model: type[BaseModel]) -> str:
    field = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] != "extra_forbidden":
        message = error["msg"].removeprefix("Value error, ")
        # What is no address may hold a key.
        is_said = repr(error["input"]) in message or field == "upload_to"
        shown = "" if is_said else f", got {error['input']!r}"
        return f"{place(field)}: {message}{shown}"
    known = model.model_fields
    near = difflib.get_close_matches(field, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return f"{place(field)}: unknown key; {hint}"
