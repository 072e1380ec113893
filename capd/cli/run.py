"""`capd run -- CMD…`: a daemon beside a training job, from the first capture to the sealed store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capd.cli.output import note

if TYPE_CHECKING:
    from capd.cli.companion import Companion

__all__ = ["run"]

_BLOCK_MS = "30000"


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD…", help="The job and its arguments.")],
    store: Annotated[
        Path | None, typer.Option("--store", help="Directory that holds the runs [default: captures].")
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option("--run-id", help="Name of the run; an existing one is continued [default: the time]."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings file [default: ./capd.toml, if there is one].")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="When buffers are full: drop, block, thin or stats [default: block]."),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option("--steps", help='Training steps that watch captures, "0-2,100-:100" or "all".'),
    ] = None,
    quant_type: Annotated[
        str | None, typer.Option("--quant-type", help="Label of the captures, such as mxfp8.")
    ] = None,
) -> None:
    """Run a training job with a daemon beside it, then seal the store and print a summary.

    The job gets CAPD_ENDPOINT, CAPD_STORE, CAPD_RUN_ID and the policy; it runs in the foreground, signals
    reach it, and its exit code is this command's (128+N after signal N). With CAPD_ENDPOINT set, the daemon
    there is joined instead of starting one.
    """
    from capd.cli.companion import join, start
    from capd.cli.job import Job, find_command
    from capd.config import resolve_daemon
    from capd_client.settings_file import read_settings_file

    program = find_command(command[0])  # exits with 126 or 127 before anything is started
    resolved = resolve_daemon({"store": store, "run_id": run_id}, path=config)
    file = read_settings_file(str(resolved.path), must_exist=True)[0] if resolved.path else {}
    _check_job_options(policy, steps)
    endpoint = os.environ.get("CAPD_ENDPOINT", "").strip()
    if endpoint.lower() == "off":
        note("CAPD_ENDPOINT=off: the job runs without capture")
        with Job() as job:
            raise typer.Exit(job.run([program, *command[1:]], dict(os.environ)))
    named = resolved.settings.run_id or shared_run_id(os.environ)
    if named is None:
        refuse_several_nodes(os.environ, command)
    with Job() as job:
        store_root = Path(resolved.settings.store)
        with join(endpoint, named) if endpoint else start(store_root, named, config) as companion:
            options = _JobOptions(policy, steps, quant_type, config)
            environ = _job_environment(os.environ, companion, options, file)
            code = job.run([program, *command[1:]], environ)
            companion.finish()
    raise typer.Exit(code)


@dataclass(frozen=True, slots=True)
class _JobOptions:
    policy: str | None
    steps: str | None
    quant_type: str | None
    config: Path | None


def _check_job_options(policy: str | None, steps: str | None) -> None:
    from capd.errors import ConfigError
    from capd_client.config import POLICIES
    from capd_client.select import Ranges

    if policy is not None and policy not in POLICIES:
        raise ConfigError(f"--policy {policy!r} is not known; use one of {', '.join(POLICIES)}")
    if steps is not None:
        Ranges(steps)


def _job_environment(
    environ: Mapping[str, str], companion: Companion, options: _JobOptions, file: Mapping[str, Any]
) -> dict[str, str]:
    """The job's environment: flags first, then what the user's environment and capd.toml already say."""
    job = {**environ, "CAPD_ENDPOINT": companion.endpoint}
    if companion.run_id:
        job["CAPD_RUN_ID"] = companion.run_id
    if companion.store is not None:
        job["CAPD_STORE"] = str(companion.store)
    if options.policy:
        job["CAPD_POLICY"] = options.policy
    elif "CAPD_POLICY" not in environ and file.get("policy") is None:
        job["CAPD_POLICY"] = "block"  # a collection run wants every capture
        if file.get("max_block_ms") is None:
            job.setdefault("CAPD_MAX_BLOCK_MS", _BLOCK_MS)
    if options.steps:
        job["CAPD_STEPS"] = options.steps
    if options.quant_type:
        job["CAPD_QUANT_TYPE"] = options.quant_type
    if options.config:
        job["CAPD_CONFIG"] = str(options.config.absolute())
    return job


def shared_run_id(environ: Mapping[str, str]) -> str | None:
    """A run id that every node of a Slurm step derives alike, or None outside of one."""
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    return f"slurm-{job}.{step}" if job and step else None


def refuse_several_nodes(environ: Mapping[str, str], command: list[str]) -> None:
    """Raise ConfigError when the job spans nodes that would each choose their own run id."""
    from capd.errors import ConfigError

    nodes = _count(environ.get("SLURM_NNODES"))
    origin = "SLURM_NNODES"
    for at, word in enumerate(command):
        if word in ("--nnodes", "-nnodes"):
            nodes, origin = max(nodes, _count(command[at + 1] if at + 1 < len(command) else None)), word
        elif word.startswith(("--nnodes=", "-nnodes=")):
            nodes, origin = max(nodes, _count(word.split("=", 1)[1])), "--nnodes"
    if nodes > 1:
        raise ConfigError(
            f"the job spans {nodes} nodes ({origin}) and no run id is shared between them; give every node "
            f"the same one: capd run --run-id NAME -- …, or CAPD_RUN_ID=NAME"
        )


def _count(text: str | None) -> int:
    """The larger number of "2" or "1:4"; 0 where there is none."""
    numbers = [part for part in (text or "").split(":") if part.isdigit()]
    return max(map(int, numbers), default=0)
