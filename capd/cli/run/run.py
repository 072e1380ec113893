"""`capd run -- CMD…`: runs a daemon next to a training job, from the first capture to the sealed store."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from capd.cli.completion import any_of, format_lists, run_names
from capd.cli.jobs.emulation import choose, with_recipe_file
from capd.cli.jobs.next_line import note_next
from capd.cli.jobs.place import Place, endpoint_of, nodes_of, refuse_several_nodes, shared_run_id
from capd.cli.jobs.report import ReportInto, check_report, reported
from capd.cli.jobs.settings import JobOptions, ResolvedJob, job_environment, resolved_job
from capd.cli.jobs.startup import Startup
from capd.cli.options import Command, flag, grouped, option
from capd.cli.output import note
from capd.cli.run.collect import CollectionOptions, collection_request, run_collection

__all__ = ["run"]


@dataclass(frozen=True)
class _RunOptions(JobOptions):
    mode: Annotated[
        str | None,
        option(
            "--mode",
            "MODE",
            "What to keep: tensor, stats or sample:1/N [default: tensor]. Or a collection: single, batch or quick.",
            autocompletion=any_of("tensor", "stats", "sample:1/", "single", "batch", "quick"),
        ),
    ] = None
    quant_type: Annotated[
        str | None,
        option(
            "--quant-type",
            "TYPE",
            "Number format in which the job's models compute, such as mxfp8, or a recipe of its linear layers: a name, "
            "such as nvfp4-te, or FILE.toml. It is the label of the captures, too. Another word is only a label. A "
            "collection takes several: T,T,… [default: mxfp8, or four types in batch].",
            autocompletion=format_lists,
        ),
    ] = None


@grouped
def run(
    command: Command,
    *,
    run_id: Annotated[
        str | None,
        option(
            "--run-id",
            "NAME",
            "Name of the run; an existing run is continued [default: the time].",
            autocompletion=run_names,
        ),
    ] = None,
    options: _RunOptions,
    label_only: Annotated[
        bool, flag("--label-only", "Emulate nothing: --quant-type is only a label.")
    ] = False,
    attach: Annotated[
        bool, flag("--attach", "Join this node's daemon (CAPD_ENDPOINT, or the default endpoint).")
    ] = False,
    collection: CollectionOptions,
    report: ReportInto = None,
) -> None:
    """Run a training job with a daemon beside it, then seal the run and print a summary on stderr.

    capd finds the models that the job trains and captures them, unless the job imports capd_client itself. The job
    runs in the foreground and gets the signals. The exit code is the job's, or 128+N after signal N. If nothing was
    captured, the summary says why. The last line has the commands to type next.

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
    from capd.cli.jobs.foreground import find_command

    quant_type, own_recipe = with_recipe_file(options.quant_type)
    options = replace(options, quant_type=quant_type)
    request = collection_request(options.mode, quant_type, collection)
    if request is not None:
        options = replace(options, mode=None, quant_type=None)
    # It exits with 126 or 127 before anything is started.
    program = "" if request else find_command(command[0])
    flags = options.flags()
    asked = {**os.environ, **collection.variables}
    if request is not None:
        # Each type has its own emulation.
        asked.pop("CAPD_EMULATE", None)
    elif quant_type is not None or label_only:
        choice = choose(own_recipe or quant_type or "", asked, label_only=label_only)
        flags["CAPD_EMULATE"] = choice.recipe
        note(f"quant_type {quant_type}, {choice.text}" if quant_type else choice.text)
    settings = resolved_job({"store": options.store, "run_id": run_id}, options.config, flags, asked)
    daemon = settings.daemon.settings
    named = daemon.run_id or shared_run_id(os.environ)
    endpoint = endpoint_of(os.environ, attach=attach, store=options.store)
    if endpoint == "off":
        note("CAPD_ENDPOINT=off: the job runs without capture")
    elif named is None or request is not None:
        refuse_several_nodes(os.environ, command, collection=request is not None, label_only=label_only)
    check_report(report, endpoint=endpoint, nodes=nodes_of(os.environ, command)[0])
    place = Place(endpoint, Path(daemon.store), named, options.config, report)
    if request is not None:
        raise typer.Exit(run_collection(request, command, collection, place, settings, label_only=label_only))
    raise typer.Exit(_run(program, command, place, settings))


def _run(program: str, command: list[str], place: Place, settings: ResolvedJob) -> int:
    """Run the job with its daemon and return its exit code."""
    from capd.cli.jobs.foreground import ForegroundJob

    job = settings.job
    startup = Startup(job.watch, replace=job.replace_tensor_saver, emulate=job.emulate is not None)
    with ForegroundJob() as process:
        if place.endpoint == "off":
            return process.run([program, *command[1:]], dict(os.environ))
        with startup, place.companion() as companion:
            environ = job_environment(os.environ, companion, settings.flags, settings.file)
            startup.put_into(environ)
            code = process.run([program, *command[1:]], environ)
            captured = companion.finish(startup.why_nothing)
            for line in startup.emulation().lines():
                note(line)
    code = reported(code, companion.store, companion.run_id, place.report)
    note_next(
        None if captured == "nothing" else companion.path,
        command,
        has_daemon=not companion.absent,
        has_tensors=captured == "tensors",
    )
    return code
