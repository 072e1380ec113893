"""`capd run -- CMD…`: a daemon beside a training job, from the first capture to the sealed store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from capd.cli.emulation import choose
from capd.cli.job_settings import checked_flags, checked_settings, job_environment
from capd.cli.options import (
    Command,
    Config,
    ControlIter,
    LabelOnly,
    MicroBatches,
    Policy,
    QuantTypes,
    Require,
    RunMode,
    SliceOfRows,
    StableFor,
    Steps,
    StoreRoot,
    Timeout,
    Until,
    Variables,
    Yes,
    flag,
    option,
)
from capd.cli.output import note
from capd.cli.run_report import ReportInto, check_report, reported
from capd.cli.startup import Startup

__all__ = ["run"]


def run(
    command: Command,
    store: StoreRoot = None,
    run_id: Annotated[
        str | None,
        option("--run-id", "NAME", "Name of the run; an existing run is continued [default: the time]."),
    ] = None,
    config: Config = None,
    policy: Policy = None,
    mode: RunMode = None,
    steps: Steps = None,
    slice_: SliceOfRows = None,
    quant_type: QuantTypes = None,
    label_only: LabelOnly = False,
    no_watch: Annotated[
        bool, flag("--no-watch", "Capture only what the job itself asks for with capd_client.")
    ] = False,
    attach: Annotated[
        bool, flag("--attach", "Join this node's daemon (CAPD_ENDPOINT, or the default endpoint).")
    ] = False,
    control_iter: ControlIter = None,
    collect_micro_batches: MicroBatches = None,
    until: Until = None,
    stable_for: StableFor = None,
    timeout: Timeout = None,
    env: Variables = None,
    require: Require = None,
    yes: Yes = False,
    report: ReportInto = None,
    as_json: Annotated[bool, flag("--json", "Print the report of a collection as JSON.")] = False,
) -> None:
    """Run a training job with a daemon beside it, then seal the run and print a summary on stderr.

    capd finds the models that the job trains and captures them, unless the job imports capd_client itself. The job
    runs in the foreground and gets the signals. The exit code is the job's, or 128+N after signal N. If nothing was
    captured, the summary says why.

    The job gets CAPD_ENDPOINT, CAPD_STORE, CAPD_RUN_ID, PYTHONPATH and the options below as variables. It also gets
    policy block and CAPD_LOG=INFO, unless you set them. All other settings are CAPD_* variables or capd.toml; `capd
    config show` lists them. A setting that cannot be used is refused before anything starts.

    With CAPD_ENDPOINT set, or with --attach, the job joins the daemon there instead of a private one. If the
    default endpoint does not answer --attach, the job runs without capture. A job on several nodes needs the same
    --run-id on each.

    With --quant-type the job's linear layers and attentions compute in that format, forward and backward. To use a
    recipe of your own, set CAPD_EMULATE. A job that quantises by itself only gets the label, and so does every job
    with --label-only.

    With --mode single, batch or quick, the command collects: it runs the job once for each quant type, ends each
    when it has N micro-batches, and prints a report. {quant_type}, {run_dir} and {index} in CMD, --env and
    --require are replaced for each type.

    \b
    Examples:
      capd run -- torchrun --nproc-per-node 2 train.py
      capd run --steps 0-2,100-:100 --run-id exp7 -- python train.py
      capd run --quant-type mxfp8 --report figures -- python train.py
      capd run --mode batch -- python train.py --save {run_dir}

    \b
    Exit codes:
      1         the job ended with 0, and its --report failed or is not whole
      2         a setting or a path cannot be used; nothing was started
      126, 127  CMD cannot be started
      128+N     signal N ended the job
    """
    from capd.cli.job import find_command
    from capd.cli.run_collection import Options, Settings, collection_request, run_collection
    from capd.config import misspelt_variables, resolve_daemon
    from capd_client.settings_file import read_settings_file

    options = Options(
        control_iter, collect_micro_batches, until, stable_for, timeout, env, require, yes, as_json
    )
    request = collection_request(mode, quant_type, options)
    if request is not None:
        mode = quant_type = None
    program = "" if request else find_command(command[0])  # exits with 126 or 127 before anything is started
    resolved = resolve_daemon({"store": store, "run_id": run_id}, path=config)
    file = read_settings_file(str(resolved.path), must_exist=True)[0] if resolved.path else {}
    flags = {"policy": policy, "mode": mode, "steps": steps, "slice": slice_, "quant_type": quant_type}
    flags["watch"] = "off" if no_watch else None
    job_flags = checked_flags({name: value for name, value in flags.items() if value is not None})
    if config is not None:
        job_flags["CAPD_CONFIG"] = str(config.absolute())
    asked = {**os.environ, **options.variables}
    if request is None and (quant_type is not None or label_only):
        choice = choose(quant_type or "", asked, label_only=label_only)
        job_flags["CAPD_EMULATE"] = choice.recipe
        note(f"quant_type {quant_type}, {choice.text}" if quant_type else choice.text)
    if request is not None:
        asked.pop("CAPD_EMULATE", None)  # of each type its own
    settings = checked_settings({**asked, **job_flags})
    for line in misspelt_variables():
        note(line)
    named = resolved.settings.run_id or shared_run_id(os.environ)
    endpoint = _endpoint(os.environ, attach=attach, store=store)
    if endpoint == "off":
        note("CAPD_ENDPOINT=off: the job runs without capture")
    elif named is None or request is not None:
        refuse_several_nodes(os.environ, command, collection=request is not None, label_only=label_only)
    check_report(report, endpoint=endpoint, nodes=nodes_of(os.environ, command)[0])
    place = Place(endpoint, Path(resolved.settings.store), named, config, report)
    if request is not None:
        raise typer.Exit(
            run_collection(
                request, command, options, place, Settings(settings, job_flags, file, resolved, label_only)
            )
        )
    startup = Startup(
        settings.watch, replace=settings.replace_tensor_saver, emulate=settings.emulate is not None
    )
    raise typer.Exit(_run([program, *command[1:]], place, startup, job_flags, file))


class Place(NamedTuple):
    """Where a job captures to: at a daemon's endpoint ("": one of its own, "off": nowhere). report: where what it has
    captured is drawn to."""

    endpoint: str
    store: Path
    run_id: str | None
    config: Path | None
    report: Path | None


def _run(
    command: list[str], place: Place, startup: Startup, flags: Mapping[str, str], file: Mapping[str, Any]
) -> int:
    """Run the job beside its daemon; returns its exit code."""
    from capd.cli.companion import join, start
    from capd.cli.job import Job

    endpoint, store, run_id, config, report = place
    with Job() as job:
        if endpoint == "off":
            return job.run(command, dict(os.environ))
        with startup, join(endpoint, run_id) if endpoint else start(store, run_id, config) as companion:
            environ = job_environment(os.environ, companion, flags, file)
            startup.put_into(environ)
            code = job.run(command, environ)
            companion.finish(startup.why_nothing)
            for line in startup.emulation().lines():
                note(line)
    return reported(code, companion.store, companion.run_id, report)


def _endpoint(environ: Mapping[str, str], *, attach: bool, store: Path | None) -> str:
    """The endpoint of the daemon to join, "" to start one, "off" for none; raises ConfigError for a contradiction."""
    from capd.errors import ConfigError
    from capd.server.endpoint import default_path

    endpoint = environ.get("CAPD_ENDPOINT", "").strip()
    if endpoint.lower() == "off":
        return "off"
    if attach and store is not None:
        raise ConfigError(
            "--store belongs to a daemon that is started here; with --attach the daemon has its own"
        )
    return endpoint or (f"unix:{default_path(environ)}" if attach else "")


def shared_run_id(environ: Mapping[str, str]) -> str | None:
    """A run id that every node of a Slurm step derives alike, or None outside of one."""
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    return f"slurm-{job}.{step}" if job and step else None


def refuse_several_nodes(
    environ: Mapping[str, str], command: list[str], *, collection: bool = False, label_only: bool = False
) -> None:
    """Raise ConfigError when the job spans nodes that would each choose their own run id, or end a collection alone."""
    from capd.errors import ConfigError

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


def nodes_of(environ: Mapping[str, str], command: list[str]) -> tuple[int, str]:
    """How many nodes the job spans, 0 where nothing says so, and what says so."""
    nodes = _count(environ.get("SLURM_NNODES"))
    origin = "SLURM_NNODES"
    for at, word in enumerate(command):
        if word in ("--nnodes", "-nnodes"):
            nodes, origin = max(nodes, _count(command[at + 1] if at + 1 < len(command) else None)), word
        elif word.startswith(("--nnodes=", "-nnodes=")):
            nodes, origin = max(nodes, _count(word.split("=", 1)[1])), "--nnodes"
    return nodes, origin


def _count(text: str | None) -> int:
    """The larger number of "2" or "1:4"; 0 where there is none."""
    numbers = [part for part in (text or "").split(":") if part.isdigit()]
    return max(map(int, numbers), default=0)
