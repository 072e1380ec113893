"""The time that a scheduler leaves between SIGTERM and SIGKILL, and the daemon's share of it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from capd.config import DaemonSettings

__all__ = ["shutdown_time"]

# KillWait of Slurm and terminationGracePeriodSeconds of Kubernetes are 30 s by default.
_WITHIN_KILL_TIME_S = 20.0
# A variable of every process of a job or pod → the scheduler, and its setting of the kill time.
_SCHEDULERS = {
    "SLURM_JOB_ID": ("Slurm", "KillWait"),
    "KUBERNETES_SERVICE_HOST": ("Kubernetes", "terminationGracePeriodSeconds"),
}


def shutdown_time(
    settings: DaemonSettings, environ: Mapping[str, str] | None = None
) -> tuple[float, str | None]:
    """Return the seconds that the daemon has to stop, and a line for its log if a scheduler shortens them.

    A value that somebody has set holds everywhere. Only the default is shortened.
    """
    environ = os.environ if environ is None else environ
    given = settings.shutdown_timeout_s
    found = next((names for variable, names in _SCHEDULERS.items() if environ.get(variable)), None)
    if found is None or "shutdown_timeout_s" in settings.model_fields_set or given <= _WITHIN_KILL_TIME_S:
        return given, None
    scheduler, setting = found
    return _WITHIN_KILL_TIME_S, (
        f"shutdown_timeout_s is {_WITHIN_KILL_TIME_S:g} instead of {given:g}, because {scheduler} kills after 30 s by "
        f"default; set CAPD_SHUTDOWN_TIMEOUT_S if your {setting} is another"
    )
