"""`capd ctl`: steers the capture of a running job, through the daemon to which its ranks are connected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import typer

from capd.cli.daemon.ranks_view import order_lines, status_lines
from capd.cli.options import Wide, flag, grouped, option
from capd.cli.output import print_json, print_lines
from capd.errors import CapdError, ConfigError, NothingMatched
from capd.metrics import RankControl
from capd.server.net.daemon_client import connect
from capd_client.protocol.control import Control, ControlReply
from capd_client.protocol.key import MAX_INDEX
from capd_client.protocol.selection import Selection

__all__ = ["app"]

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)

# The time for the reply, beyond the time that the daemon waits for ranks.
_ANSWER_S = 10.0
# The daemon gives up sooner than this.
_SEAL_S = 660.0
_MAX_REASON_CHARS = 200
# The rest of a daemon's life after its last answer.
_EXIT_S = 5.0

RunId = Annotated[str | None, option("--run-id", "NAME", "The run [default: the only one with live ranks].")]
SealedRun = Annotated[str | None, option("--run-id", "NAME", "The run [default: all runs of the daemon].")]
Endpoint = Annotated[str | None, option("--endpoint", "unix:PATH", "The daemon [default: CAPD_ENDPOINT].")]
Json = Annotated[bool, flag("--json", "Print the ranks as JSON.")]
Timeout = Annotated[
    float,
    option(
        "--timeout", "SECONDS", "How long to wait for the ranks; a step may take longer.", min=0.1, max=3600
    ),
]


@dataclass(frozen=True)
class OrderOptions:
    """The options of every order about what the ranks capture."""

    run_id: RunId = None
    at: Annotated[
        int | None,
        option(
            "--at",
            "ITERATION",
            "Take effect from this one [default: the next that no rank has begun].",
            min=0,
            max=MAX_INDEX,
        ),
    ] = None
    timeout: Timeout = 30.0
    no_wait: Annotated[bool, flag("--no-wait", "Return at once, without waiting for the ranks.")] = False
    endpoint: Endpoint = None
    as_json: Json = False

    def give(self, verb: Literal["start", "stop", "select"], selection: Selection | None) -> None:
        """Give the order, and print what the ranks do with it."""
        wait_s = 0.0 if self.no_wait else self.timeout
        order = Control(verb, self.run_id, selection, self.at, wait_s)
        _show(_ask(order, self.endpoint), self.as_json, order_lines)


@app.callback()
def _group() -> None:
    """Steer the capture of a running job: all ranks of one run on this node, from the same iteration on.

    The orders go through the daemon that the ranks are connected to (CAPD_ENDPOINT, or the default path). Who may
    connect to its socket may give them. Without --run-id the order is for the only run with live ranks.

    `start`, `stop` and `select` replace each other as a whole: after `select --modules "*.mlp.*"`, `select --steps
    all` is all modules again, and `start` after `stop` knows of no earlier `select`.

    An order holds from the next iteration that no rank has begun. It is a little later if steps are too short for a
    message to reach every rank in time; a rank that is more than 1000 iterations ahead is not waited for. --at
    names the iteration. A job on several nodes has a daemon on each: give the order on each node, with the same
    --at.

    The command waits until every live rank has followed, and prints the iteration from which the order holds on
    each rank. Ranks that have not followed in time are named (exit code 1), and follow when they get there. A rank
    that connects later follows from its first iteration on.

    \b
    Examples:
      capd ctl status
      capd ctl stop
      capd ctl start --steps 500-
      capd ctl select --modules "*.mlp.*" --tensors input,grad_output
      capd ctl select --reset
      capd ctl keep --reason "loss spike"
      capd ctl shutdown

    \b
    Exit codes:
      1  some ranks have not followed yet, or a daemon left records unsealed
      2  several runs have live ranks: name one with --run-id
      3  no daemon answers
      5  no such run, or the selection matches nothing
    """


@app.command(short_help="Show where each rank is and what it captures.")
def status(
    run_id: RunId = None, endpoint: Endpoint = None, wide: Wide = False, as_json: Json = False
) -> None:
    """Show where each rank is, what it captures, and which order it has not followed yet."""
    _show(_ask(Control("status", run_id), endpoint), as_json, partial(status_lines, wide=wide))


@app.command(short_help="Capture again.")
@grouped
def start(
    steps: Annotated[
        str | None, option("--steps", "RANGE", 'Capture these steps, such as "all" or "500-".')
    ] = None,
    *,
    order: OrderOptions,
) -> None:
    """Capture again: the selection of the script and its configuration, or --steps of it."""
    selection = None if steps is None else _selection(steps=steps)
    order.give("start", selection)


@app.command(short_help="Capture nothing any more.")
@grouped
def stop(order: OrderOptions) -> None:
    """Capture nothing from now on. Each capture() of the script is counted as a drop (stopped)."""
    order.give("stop", None)


@app.command(short_help="Capture other steps, modules or tensors.")
@grouped
def select(
    steps: Annotated[str | None, option("--steps", "RANGE", 'Steps, such as "all" or "100-:100".')] = None,
    micro_batches: Annotated[str | None, option("--micro-batches", "RANGE", "Micro-batches.")] = None,
    ranks: Annotated[str | None, option("--ranks", "RANGE", "Ranks.")] = None,
    modules: Annotated[
        list[str] | None,
        option("--modules", "GLOB", "Linear modules of the watched models. May be given several times."),
    ] = None,
    tensors: Annotated[
        list[str] | None,
        option(
            "--tensors",
            "NAME",
            "Their tensors: input, weight, output, grad_output, grad_input, grad_weight. May be given several "
            "times.",
        ),
    ] = None,
    reset: Annotated[bool, flag("--reset", "Return to the selection of the script.")] = False,
    *,
    order: OrderOptions,
) -> None:
    """Capture this selection instead of the one of every watch() of the job.

    An option that is not given stays as in the script. Ranges are written as in CAPD_STEPS: "0-2,100-:100", or all.
    Globs go over module names as `capd ls` shows them, and match any Linear module of a watched model, also one
    that watch(select=…) left out. Explicit capture() calls are not selected: only `stop` affects them. A job that
    captures only with capture(…, iteration=n) is steered by these numbers.
    """
    given = any(part is not None for part in (steps, micro_batches, ranks, modules or None, tensors or None))
    if reset == given:
        raise ConfigError("say what to select (--steps, --modules, …; see --help), or --reset")
    selection = None if reset else _selection(steps, micro_batches, ranks, modules, tensors)
    order.give("select", selection)


@app.command(short_help="Wait until all captures so far are in the store.")
def flush(run_id: RunId = None, timeout: Timeout = 30.0, endpoint: Endpoint = None) -> None:
    """Return once everything that all ranks have captured by now is committed to the store."""
    _say(_ask(Control("flush", run_id, wait_s=timeout), endpoint))


@app.command(short_help="Have the flight recorder keep its last iterations.")
def keep(
    run_id: RunId = None,
    reason: Annotated[
        str, option("--reason", "TEXT", "A few words for the metadata of the records.")
    ] = "capd ctl keep",
    iteration: Annotated[
        int | None,
        option(
            "--iteration",
            "N",
            "Keep the iterations around this one [default: the newest one].",
            min=0,
            max=MAX_INDEX,
        ),
    ] = None,
    endpoint: Endpoint = None,
) -> None:
    """Store the last iterations of all ranks that the flight recorder holds, and those that follow.

    The daemons of the other nodes on the same store keep the same iterations. See [window] in docs/recorder.md. A
    daemon without it stores every capture anyway, and says so (exit code 1).
    """
    if len(reason) > _MAX_REASON_CHARS:
        raise ConfigError(f"--reason: {len(reason)} characters are more than {_MAX_REASON_CHARS}")
    _say(_ask(Control("keep", run_id, iteration=iteration, reason=reason), endpoint))


@app.command(short_help="Publish committed records to plain Zarr readers.")
def seal(run_id: SealedRun = None, endpoint: Endpoint = None) -> None:
    """Publish the committed records to plain Zarr readers now."""
    _say(_ask(Control("seal", run_id), endpoint))


@app.command(short_help="End the daemon, after everything is sealed.")
def shutdown(
    timeout: Annotated[
        float, option("--timeout", "SECONDS", "How long to wait for the end.", min=0.1, max=3600)
    ] = 120.0,
    no_wait: Annotated[bool, flag("--no-wait", "Return at once, without waiting for the end.")] = False,
    endpoint: Endpoint = None,
) -> None:
    """End the daemon, as SIGTERM does: it takes what ranks have sent, seals everything, and exits.

    The command returns when the daemon is gone. A batch script of a scheduler calls it after the job, so that its
    `wait` for the daemon ends. Ranks that still run are not ended: their captures wait for the next daemon.
    """
    order = Control("shutdown", wait_s=0.0 if no_wait else timeout)
    _say(_ask(order, endpoint, after_s=_EXIT_S))


def _selection(
    steps: str | None,
    micro_batches: str | None = None,
    ranks: str | None = None,
    modules: list[str] | None = None,
    tensors: list[str] | None = None,
) -> Selection:
    """Return the selection, checked before it is sent. Raises ConfigError."""
    names = [name.strip() for text in tensors or () for name in text.split(",")]
    selection = Selection(
        steps=steps,
        micro_batches=micro_batches,
        ranks=ranks,
        modules=tuple(modules) if modules else None,
        tensors=tuple(names) if names else None,
    )
    selection.check()
    return selection


def _ask(message: Control, endpoint: str | None, after_s: float = 0.0) -> ControlReply:
    """Return the daemon's reply. The reply may take longer than the time that the message gives the ranks.

    After a reply "ok" it waits at most `after_s` for the end of the connection.

    Raises:
        EndpointError: If no daemon answers.
        ConfigError: If no daemon would accept the message.
    """
    from capd.config import load_daemon_settings
    from capd.server.net.endpoint import endpoint_path
    from capd.server.runs.names import check_run_id

    if message.run_id is not None:
        check_run_id(message.run_id)
    settings = load_daemon_settings({} if endpoint is None else {"endpoint": endpoint})
    with connect(endpoint_path(settings.endpoint)) as tool:
        reply = tool.control(message, message.wait_s + (_SEAL_S if message.verb == "seal" else _ANSWER_S))
        if message.wait_s and after_s and reply.ok:
            tool.wait_end(after_s)
        return reply


def _show(reply: ControlReply, as_json: bool, render: Callable[[list[RankControl]], list[str]]) -> None:
    """Print the ranks, even if not all of them follow the order. Then raise an error if the reply is not "ok"."""
    if as_json and (reply.ranks or reply.ok):
        print_json(reply.ranks)
    elif reply.ranks:
        print_lines(render([RankControl.model_validate(rank) for rank in reply.ranks]))
    _check(reply)


def _say(reply: ControlReply) -> None:
    _check(reply)
    print_lines([reply.message])


def _check(reply: ControlReply) -> None:
    """Raise the error that gives the exit code of a reply that is not "ok"."""
    if reply.code == "usage":
        raise ConfigError(reply.message)
    if reply.code == "nothing":
        raise NothingMatched(reply.message)
    if reply.code == "failed":
        raise CapdError(reply.message)
