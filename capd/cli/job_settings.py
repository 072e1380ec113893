"""The settings of a job that `capd run` or `capd plan` starts: checked first, then put into its environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capd.cli.companion import Companion
    from capd_client.config import ClientConfig

__all__ = ["checked_flags", "checked_settings", "job_environment"]

_BLOCK_MS = "30000"


def checked_flags(flags: Mapping[str, str]) -> dict[str, str]:
    """The job's settings that were given as flags, as its variables; raises ConfigError that names the flag."""
    from capd.errors import ConfigError
    from capd_client.config import check_setting

    for name, value in flags.items():
        try:
            check_setting(name, value)
        except ConfigError as error:
            raise ConfigError(f"--{name.replace('_', '-')}: {error}") from None
    return {f"CAPD_{name.upper()}": value for name, value in flags.items()}


def checked_settings(environ: Mapping[str, str]) -> ClientConfig:
    """The job's settings; raises ConfigError for what it would only warn of, while there is nothing to lose yet."""
    from capd_client.config import load_config

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
