"""The settings of a job that `capd run` or `capd plan` starts: checked first, then put into the job's environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from capd.cli.completion import any_of
from capd.cli.options import Config, StoreRoot, flag, option
from capd.cli.output import note

if TYPE_CHECKING:
    from capd.cli.jobs.companion import Companion
    from capd.config import Resolved
    from capd_client.config.settings import ClientConfig

__all__ = [
    "JobOptions",
    "ResolvedJob",
    "checked_flags",
    "checked_settings",
    "job_environment",
    "resolved_job",
]

_BLOCK_MS = "30000"


@dataclass(frozen=True)
class JobOptions:
    """The options with which `capd run` and `capd plan` set up a job."""

    store: StoreRoot = None
    config: Config = None
    policy: Annotated[
        str | None,
        option(
            "--policy",
            "POLICY",
            "If there is no room: drop, block, thin or stats [default: block].",
            autocompletion=any_of("drop", "block", "thin", "stats"),
        ),
    ] = None
    mode: Annotated[
        str | None,
        option(
            "--mode",
            "MODE",
            "What to keep: tensor, stats or sample:1/N [default: tensor].",
            autocompletion=any_of("tensor", "stats", "sample:1/"),
        ),
    ] = None
    steps: Annotated[
        str | None,
        option(
            "--steps", "RANGE", 'Training steps to capture: "0-2,100-:100" or "all" [default: the first].'
        ),
    ] = None
    slice: Annotated[
        str | None,
        option("--slice", "SLICE", "Rows of activations: first:64, stride:8, tokens:0-127 [default: all]."),
    ] = None
    quant_type: Annotated[
        str | None, option("--quant-type", "WORD", "Label of the captures, such as mxfp8.")
    ] = None
    perturb: Annotated[
        str | None,
        option(
            "--perturb",
            "EPS[:SEED]",
            "Multiply the first numbers of the job's models by 1 ± EPS, for `capd compare --noise` [default: off].",
        ),
    ] = None
    no_watch: Annotated[
        bool, flag("--no-watch", "Take only what the job itself asks for with capd_client.")
    ] = False

    def flags(self) -> dict[str, str]:
        """Return the job's settings among the options, as `checked_flags` does."""
        given = {
            name: getattr(self, name)
            for name in ("policy", "mode", "steps", "slice", "quant_type", "perturb")
        }
        return checked_flags({**given, "watch": "off" if self.no_watch else None})


class ResolvedJob(NamedTuple):
    """The settings of a job and of its daemon.

    Attributes:
        daemon: The daemon's settings.
        file: The tables of capd.toml.
        flags: The job's command-line settings, as variables of the job.
        job: The job's settings, resolved from all sources.
    """

    daemon: Resolved
    file: Mapping[str, Any]
    flags: Mapping[str, str]
    job: ClientConfig


def resolved_job(
    daemon: Mapping[str, Any], config: Path | None, flags: Mapping[str, str], environ: Mapping[str, str]
) -> ResolvedJob:
    """Resolve and check all settings. A note names variables that look misspelt.

    Args:
        daemon: The daemon's settings of the command line, None for each that was not given.
        config: The capd.toml of `--config`, None if it was not given.
        flags: The job's settings of the command line, as `checked_flags` returns them.
        environ: The job's environment.

    Raises:
        ConfigError: If a setting of any source is wrong.
    """
    from capd.config import misspelt_variables, resolve_daemon
    from capd_client.config.file import read_settings_file

    resolved = resolve_daemon(daemon, path=config)
    file = read_settings_file(str(resolved.path), must_exist=True)[0] if resolved.path else {}
    if config is not None:
        flags = {**flags, "CAPD_CONFIG": str(config.absolute())}
    job = checked_settings({**environ, **flags})
    for line in misspelt_variables():
        note(line)
    return ResolvedJob(resolved, file, flags, job)


def checked_flags(flags: Mapping[str, str | None]) -> dict[str, str]:
    """Return the job's settings that were given as flags, as variables of the job.

    Raises:
        ConfigError: If a value cannot be used. The message names the flag.
    """
    from capd.errors import ConfigError
    from capd_client.config.settings import check_setting

    given = {name: value for name, value in flags.items() if value is not None}
    for name, value in given.items():
        try:
            check_setting(name, value)
        except ConfigError as error:
            raise ConfigError(f"--{name.replace('_', '-')}: {error}") from None
    return {f"CAPD_{name.upper()}": value for name, value in given.items()}


def checked_settings(environ: Mapping[str, str]) -> ClientConfig:
    """Return the job's settings.

    Raises:
        ConfigError: If a setting cannot be used. The job itself would only warn, but now there is nothing to lose.
    """
    from capd_client.config.settings import load_config

    return load_config({**environ, "CAPD_STRICT": "1", "CAPD_ENDPOINT": "off"})


def job_environment(
    environ: Mapping[str, str], companion: Companion, flags: Mapping[str, str], file: Mapping[str, Any]
) -> dict[str, str]:
    """Return the job's environment: flags first, then the user's environment and capd.toml."""
    job = {"CAPD_LOG": "INFO", **environ, **flags, "CAPD_ENDPOINT": companion.endpoint}
    job.pop("CAPD_RUN_NO_DAEMON", None)
    if companion.absent:
        # The note of this command is enough; ranks need not repeat it.
        job["CAPD_RUN_NO_DAEMON"] = "1"
    if companion.run_id:
        job["CAPD_RUN_ID"] = companion.run_id
    if companion.store is not None:
        job["CAPD_STORE"] = str(companion.store)
    if not job.get("CAPD_POLICY") and file.get("policy") is None:
        # A run of `capd run` wants every capture.
        job["CAPD_POLICY"] = "block"
        if file.get("max_block_ms") is None:
            job.setdefault("CAPD_MAX_BLOCK_MS", _BLOCK_MS)
    return job
