"""`capd plan -- CMD…`: shows from a job's first steps what it would capture, before anything is captured."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capd.cli.jobs.settings import JobOptions
from capd.cli.options import Command, Json, Wide, flag, grouped, option
from capd.cli.output import note, print_json, print_lines
from capd.cli.table import TextTables, prose

if TYPE_CHECKING:
    from capd.config import DaemonSettings
    from capd_client.planning.seen import RankSeen

__all__ = ["plan"]

_LABEL = len("  memory     ")
# What a daemon has beside its staging buffers, at most.
_DAEMON_NBYTES = 256 << 20


@grouped
def plan(
    command: Command,
    *,
    options: JobOptions,
    iterations: Annotated[
        int, option("--iterations", "N", "Steps that the job trains for the plan.", min=1, max=1000)
    ] = 3,
    timeout_s: Annotated[
        float, option("--timeout", "SECONDS", "End the job after this time in any case.", min=1.0)
    ] = 1800.0,
    shared: Annotated[
        Path | None, option("--shared", "DIR", "Directory that all nodes see: plan the ranks of all nodes.")
    ] = None,
    every_series: Annotated[
        bool, flag("--all", "Print a line for each series, not for each group of layers.")
    ] = False,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Show what a job would capture and what that takes: series, bytes, link time, disk, memory.

    Nothing is captured: there is no daemon, no arena and no store. The job itself runs and really trains. SIGTERM
    ends it when every rank of this node has finished its first steps, or when a step seems to have no end. SIGKILL
    follows after 60 s. Files that a script writes in its first steps, or on SIGTERM, are written. Its output goes to
    stderr, including the launcher's messages about the SIGTERM.

    The options are those of `capd run`. Every planned step is looked at, whatever --steps selects; micro-batches
    and ranks are selected as in a run. If a captured step has the shapes of a planned one, its series, shapes,
    records and bytes are exactly the planned ones. Drops by the policy, a full disk or max_mb_per_step are not
    subtracted: warnings name them. An explicit capture() counts at the rate of the planned steps.

    The table has one line for all layers and experts that are alike, and one table for all ranks that are alike.
    Below it, for each rank: records and bytes of a captured step, the median step time, the time on the
    link, and the captured steps that fit into the arena. The link's speed is max_d2h_gbps, or is measured by a copy
    of 64 MiB. For each node: bytes in 1,000 steps and per hour, when the disk is full, the speed of the store's disk
    (a trial of 64 MiB), what the iterations of [window] take and whether its bytes hold them, memory, and what to add
    to the memory limits of containers. Warnings name figures that are
    too large, and the setting to change.

    On several nodes, run it on one node for that node's ranks. If CMD itself starts the ranks of all nodes, as srun
    does, --shared plans all of them.

    \b
    Examples:
      capd plan -- torchrun --nproc-per-node 2 train.py
      capd plan --steps all --slice first:64 --all -- python train.py

    \b
    Exit codes:
      0         planned, even if the job failed afterwards
      1         the job ended before a step was finished; the plan is partial
      5         the job ended well and asked for no capture
      126, 127  CMD cannot be started
    """
    from capd.cli.jobs.companion import Companion
    from capd.cli.jobs.foreground import find_command
    from capd.cli.jobs.settings import job_environment, resolved_job
    from capd.cli.jobs.startup import Startup
    from capd_client.planning.text import plan_lines

    program = find_command(command[0])
    settings = resolved_job({"store": options.store}, options.config, options.flags(), os.environ)
    daemon = settings.daemon.settings
    startup = Startup(settings.job.watch, replace=settings.job.replace_tensor_saver)
    # The directory is private to this user and is removed afterwards.
    made = tempfile.TemporaryDirectory(prefix="capd-plan-", dir=shared, ignore_cleanup_errors=True)
    with made, startup:
        directory = Path(made.name).absolute()
        companion = Companion(f"unix:{directory}/none.sock", None, daemon.store.absolute())
        environ = job_environment(os.environ, companion, settings.flags, settings.file)
        environ |= {"CAPD_PLAN": str(directory), "CAPD_PLAN_STEPS": str(iterations)}
        startup.put_into(environ)
        seen, code = _train(
            [program, *command[1:]], environ, directory, timeout_s, all_nodes=shared is not None
        )
        _check_seen(seen, code, timeout_s, startup.why_nothing)
    found = _plan(seen, daemon, ended=code == 0)
    tables = TextTables(("module", "host"), ("dtype", "series", "records", "shape", "link"), wide=wide)
    lines = plan_lines(found, every_series=every_series, draw=tables)
    if as_json:
        print_json(found)
    else:
        print_lines(prose(lines, _LABEL, wide=wide))
        tables.note_left_out()
    if not all(rank["complete"] for rank in found["ranks"]):
        note("no step of some ranks was finished: their figures cover only the part that ran")
        raise typer.Exit(1)


def _train(
    command: list[str], environ: dict[str, str], directory: Path, timeout_s: float, *, all_nodes: bool
) -> tuple[list[RankSeen], int | None]:
    """Return the documents of the ranks, and the job's exit code if it ended by itself."""
    from capd.cli.run.planned_job import PlannedJob, documents

    with PlannedJob(command, environ, directory) as job:
        try:
            job.start()
        except OSError as error:
            note(f"{command[0]} cannot be executed: {error.strerror or error}")
            raise typer.Exit(126) from None
        code = job.wait(timeout_s, all_nodes=all_nodes)
        if code is None:
            note("planned; the job is ended by SIGTERM")
        seen = documents(directory)
    return seen, code


def _check_seen(
    seen: list[RankSeen], code: int | None, timeout_s: float, why_nothing: Callable[[bool], str]
) -> None:
    """Raise an error with the reason if no rank has anything to plan from."""
    from capd.errors import CapdError, NothingMatched

    how = (
        f"the job ran for {timeout_s:g} s (--timeout)"
        if code is None
        else f"the job ended with exit code {code}"
    )
    if any(one.series for one in seen):
        if code:
            note(how)
        return
    trained = max((len(one.iterations) for one in seen), default=0)
    why = f"nothing in {trained} steps was to be captured" if trained else why_nothing(bool(seen))
    raise (CapdError if code != 0 else NothingMatched)(f"nothing is planned: {how}, and {why}")


def _plan(seen: list[RankSeen], settings: DaemonSettings, *, ended: bool) -> dict[str, Any]:
    """Return the plan, with the figures of this node's daemon and disk."""
    from capd.server.limits import encode_threads, staging_within
    from capd_client.planning.disk import disk_plan, write_speed
    from capd_client.planning.whole import whole_plan

    host, store = socket.gethostname(), str(settings.store)
    disk = {
        **disk_plan(store, settings.max_disk, settings.keep_free, settings.run_max),
        "write_bytes_per_s": write_speed(store),
    }
    window = None if settings.window is None else (settings.window.iterations, settings.window.nbytes)
    found = whole_plan(seen, host=host, disk=disk, ended=ended, window=window)
    for node in found["nodes"]:
        is_here = node["host"] == host
        node["encode_threads"] = (settings.threads or encode_threads()) if is_here else None
        node["daemon_bytes"] = _DAEMON_NBYTES + staging_within(settings.staging_bytes) if is_here else None
    return found
