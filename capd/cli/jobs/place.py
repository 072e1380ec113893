"""The place that a job captures to (daemon, store and run), and the number of nodes on which the job runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from capd.errors import ConfigError

if TYPE_CHECKING:
    from capd.cli.jobs.companion import Companion

__all__ = ["Place", "endpoint_of", "nodes_of", "refuse_several_nodes", "shared_run_id"]


class Place(NamedTuple):
    """The place that a job captures to.

    Attributes:
        endpoint: The endpoint of the daemon to join, "" to start a daemon, "off" for none.
        store: The root of the store.
        run_id: The run, None until it is chosen.
        config: The settings file of `--config`.
        report: The directory for a report of the captures, None for no report.
    """

    endpoint: str
    store: Path
    run_id: str | None
    config: Path | None
    report: Path | None

    def companion(self) -> Companion:
        """Join the daemon, or start one. Raises the errors of `join` and `start` in `capd.cli.jobs.companion`."""
        from capd.cli.jobs.companion import join, start

        if self.endpoint:
            return join(self.endpoint, self.run_id)
        return start(self.store, self.run_id, self.config)


def endpoint_of(environ: Mapping[str, str], *, attach: bool, store: Path | None) -> str:
    """Return the endpoint of the daemon to join, "" to start one, "off" for none.

    Args:
        environ: The environment of `capd run`.
        attach: Whether `--attach` was given.
        store: The directory of `--store`, None if it was not given.

    Raises:
        ConfigError: If the options contradict each other.
    """
    from capd.server.net.endpoint import default_path

    endpoint = environ.get("CAPD_ENDPOINT", "").strip()
    if endpoint.lower() == "off":
        return "off"
    if attach and store is not None:
        raise ConfigError(
            "--store belongs to a daemon that is started here; with --attach the daemon has its own"
        )
    return endpoint or (f"unix:{default_path(environ)}" if attach else "")


def shared_run_id(environ: Mapping[str, str]) -> str | None:
    """Return the run id that every node of a Slurm step derives alike, None outside of a step."""
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    return f"slurm-{job}.{step}" if job and step else None


def refuse_several_nodes(
    environ: Mapping[str, str], command: Sequence[str], *, collection: bool = False, label_only: bool = False
) -> None:
    """Raise ConfigError if the job spans nodes that would each choose a run id, or each end a collection."""
    nodes, origin = nodes_of(environ, command)
    if nodes > 1 and collection:
        label = " --label-only" if label_only else ""
        raise ConfigError(
            f"the job spans {nodes} nodes ({origin}), and a collection run ends the jobs of one; on several, run each "
            f"type by itself: CAPD_COLLECT=N/M CAPD_STEPS=all capd run --run-id NAME --quant-type T{label} -- …"
        )
    if nodes > 1:
        raise ConfigError(
            f"the job spans {nodes} nodes ({origin}) and no run id is shared between them; give every node "
            f"the same one: capd run --run-id NAME -- …, or CAPD_RUN_ID=NAME"
        )


def nodes_of(environ: Mapping[str, str], command: Sequence[str]) -> tuple[int, str]:
    """Return the number of nodes that the job spans, 0 if unknown, and the variable or option with the number."""
    nodes = _count(environ.get("SLURM_NNODES"))
    origin = "SLURM_NNODES"
    for at, word in enumerate(command):
        if word in ("--nnodes", "-nnodes"):
            nodes, origin = max(nodes, _count(command[at + 1] if at + 1 < len(command) else None)), word
        elif word.startswith(("--nnodes=", "-nnodes=")):
            nodes, origin = max(nodes, _count(word.split("=", 1)[1])), "--nnodes"
    return nodes, origin


def _count(text: str | None) -> int:
    """Return the larger number of a text like "2" or "1:4", 0 if there is none."""
    numbers = [part for part in (text or "").split(":") if part.isdigit()]
    return max(map(int, numbers), default=0)
