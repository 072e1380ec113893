"""The settings of a job that `capd run` or `capd plan` starts: checked first, then put into its environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from capd.cli.output import note

if TYPE_CHECKING:
    from capd.cli.jobs.companion import Companion
    from capd.config import Resolved
    from capd_client.config.settings import ClientConfig

__all__ = ["ResolvedJob", "checked_flags", "checked_settings", "job_environment", "resolved_job"]

_BLOCK_MS = "30000"


class ResolvedJob(NamedTuple):
    """The settings of a job and of its daemon.

    daemon: the daemon's. file: the tables of capd.toml. flags: the job's command-line settings, as its variables.
    job: the job's settings from everywhere.
    """

    daemon: Resolved
    file: Mapping[str, Any]
    flags: Mapping[str, str]
    job: ClientConfig


def resolved_job(
    daemon: Mapping[str, Any], config: Path | None, flags: Mapping[str, str], environ: Mapping[str, str]
) -> ResolvedJob:
    """Resolves and checks all settings; a note names variables that look misspelt.

    Args:
        daemon: the daemon's settings of the command line, None for those not given.
        config: the capd.toml of `--config`, None where it was not given.
        flags: the job's settings of the command line, as `checked_flags` returns them.
        environ: the job's environment.

    Raises:
        ConfigError: for a setting that is wrong, wherever it is.
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


def checked_flags(flags: Mapping[str, str | None], *, no_watch: bool = False) -> dict[str, str]:
    """The job's settings that were given as flags, as its variables; raises ConfigError that names the flag."""
    from capd.errors import ConfigError
    from capd_client.config.settings import check_setting

    given = {name: value for name, value in flags.items() if value is not None}
    if no_watch:
        given["watch"] = "off"
    for name, value in given.items():
        try:
            check_setting(name, value)
        except ConfigError as error:
            raise ConfigError(f"--{name.replace('_', '-')}: {error}") from None
    return {f"CAPD_{name.upper()}": value for name, value in given.items()}


def checked_settings(environ: Mapping[str, str]) -> ClientConfig:
    """The job's settings; raises ConfigError for what it would only warn of, while there is nothing to lose yet."""
    from capd_client.config.settings import load_config

    return load_config({**environ, "CAPD_STRICT": "1", "CAPD_ENDPOINT": "off"})


def job_environment(
    environ: Mapping[str, str], companion: Companion, flags: Mapping[str, str], file: Mapping[str, Any]
) -> dict[str, str]:
    """The job's environment: flags first, then what the user's environment and capd.toml already say."""
    job = {"CAPD_LOG": "INFO", **environ, **flags, "CAPD_ENDPOINT": companion.endpoint}
    job.pop("CAPD_RUN_NO_DAEMON", None)
    if companion.absent:
        job["CAPD_RUN_NO_DAEMON"] = "1"  # ranks need not say it again
    if companion.run_id:
        job["CAPD_RUN_ID"] = companion.run_id
    if companion.store is not None:
        job["CAPD_STORE"] = str(companion.store)
    if not job.get("CAPD_POLICY") and file.get("policy") is None:
        job["CAPD_POLICY"] = "block"  # a collection run wants every capture
        if file.get("max_block_ms") is None:
            job.setdefault("CAPD_MAX_BLOCK_MS", _BLOCK_MS)
    return job
