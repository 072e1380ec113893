"""The `capd` command: its verbs, the module of each verb, and the exit codes of errors.

A verb's module is imported when the verb is used. So `capd --help` costs little, and `capd ls` never imports torch or
zarr.

Exit codes: 0 ok, 1 failure, 2 usage, 3 daemon unreachable, 4 damage found, 5 nothing matched, 6 out of space or
budget, 7 store owned by another daemon, 8 stopped with records left unsealed, 130 Ctrl-C.
"""

from __future__ import annotations

import importlib
import io
import sys
import traceback
from typing import Annotated, Any, NamedTuple, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

from capd.errors import CapdError, exit_code_of
from capd_client.process.text import printable

__all__ = ["VERBS", "main"]


class _Verb(NamedTuple):
    # The module of the verb, below capd.cli.
    path: str
    # The attribute is a command function, or a typer.Typer with subcommands.
    attribute: str
    help: str

    @property
    def module(self) -> str:
        return f"capd.cli.{self.path}"


VERBS: dict[str, _Verb] = {
    "serve": _Verb("daemon.serve", "serve", "Run the daemon of this node."),
    "run": _Verb("run.run", "run", "Run a training job with a daemon beside it, and print a summary."),
    "plan": _Verb("run.plan", "plan", "Show what a job would capture, and what that takes; capture nothing."),
    "ctl": _Verb("daemon.ctl", "app", "Stop, start and re-select capture in a running job."),
    "stats": _Verb(
        "store.stats", "stats", "Show the counters: offered, committed, in flight, dropped, disk left."
    ),
    "top": _Verb("live.top", "top", "Watch a node in the terminal: ranks, drops, disk, newest records."),
    "web": _Verb("live.web", "web", "Show runs in a browser, live and finished."),
    "alerts": _Verb("live.alerts", "alerts", "Print what rules said about a run; follow a live one."),
    "rules": _Verb("live.rules", "app", "Check the rules of [[trigger]]."),
    "ls": _Verb("store.ls", "ls", "List the series of a run, or count them by a field."),
    "show": _Verb("store.show", "show", "Show a series or a record: moments, statistics, values."),
    "compare": _Verb(
        "compare.compare", "compare", "Compare number formats on captured tensors, or two captures."
    ),
    "check": _Verb("check.check", "check", "Check captured products against their own captured operands."),
    "replay": _Verb(
        "replay.replay", "replay", "Compute captured products again under recipes of quantised training."
    ),
    "report": _Verb("report.report", "report", "Write statistics and figures as a page or into a directory."),
    "plot": _Verb("report.plot", "plot", "Draw one figure for a paper: PNG, SVG or PDF."),
    "metrics": _Verb(
        "report.metrics", "metrics", "Show what papers plot over the steps: noise ratio, scales, oscillation."
    ),
    "plan-tasks": _Verb(
        "store.plan_tasks", "plan_tasks", "Print the tasks of a comparison for Ray, Spark or another engine."
    ),
    "export": _Verb(
        "store.export", "export", "Write records as .pt files, .npz, safetensors or a Parquet table."
    ),
    "import": _Verb(
        "store.import_", "import_files", "Read .pt files of tensor_saver, or exported ones, into a run."
    ),
    "runs": _Verb("lifecycle.runs", "runs", "List runs: when, state, steps, records, size, command."),
    "du": _Verb("lifecycle.du", "du", "Count the disk space of runs, series and the trash."),
    "rm": _Verb("lifecycle.rm", "rm", "Remove runs, or series of a run, into the trash; bring runs back."),
    "prune": _Verb("lifecycle.prune", "prune", "Remove the runs that no rule keeps."),
    "tag": _Verb("lifecycle.tag", "tag", "Add tags to a run."),
    "pin": _Verb("lifecycle.tag", "pin", "Pin runs: nothing removes them."),
    "unpin": _Verb("lifecycle.tag", "unpin", "Unpin runs."),
    "gc": _Verb("lifecycle.gc", "gc", "Free the trash, quarantines and leftovers of kills."),
    "cp": _Verb("copying.cp", "cp", "Copy a run, or a part of it, into a new run."),
    "merge": _Verb("copying.merge", "merge", "Merge runs into a new run."),
    "upload": _Verb("upload.upload", "upload", "Upload runs to an object store, such as s3://bucket/prefix."),
    "verify": _Verb("store.verify", "verify", "Check a run for damage, and repair it."),
    "doctor": _Verb("daemon.doctor", "doctor", "Check this machine, the endpoint and every dtype."),
    "config": _Verb("daemon.config", "app", "Show the settings in effect and where each comes from."),
}


class _Word(NamedTuple):
    """A verb that the shell offers at TAB."""

    value: str
    help: str
    type: str = "plain"


class _Command(TyperCommand):
    """A verb whose usage line names its arguments as its help does: `capd run [OPTIONS] -- CMD…`."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)
        for one in found:
            if one.param_type_name == "argument":
                # STORE says more than the type in Python that typer adds: STORE <Any>.
                one.display_type = lambda _: None
        return found

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        names = [(one.metavar or one.name.upper(), one.required) for one in arguments]
        return ["[OPTIONS]", *(name if required else f"[{name.strip('[]')}]" for name, required in names)]


class _Verbs(TyperGroup):
    """A command group that imports a verb's module only when the verb is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # The names alone are enough for "did you mean".
        self.commands = cast("Any", dict.fromkeys(VERBS))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        target = getattr(importlib.import_module(verb.module), verb.attribute)
        if not isinstance(target, typer.Typer):
            single = typer.Typer(add_completion=False, rich_markup_mode=None)
            # In `capd run CMD -x`, all words from CMD on belong to the job.
            settings = {"allow_interspersed_args": cmd_name not in ("run", "plan")}
            single.command(name=cmd_name, cls=_Command, context_settings=settings)(target)
            target = single
        return typer.main.get_command(target)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [_Word(name, verb.help) for name, verb in VERBS.items() if name.startswith(incomplete)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.help) for name, verb in VERBS.items()])


app = typer.Typer(
    cls=_Verbs,
    name="capd",
    # Rich would take a third of the time of `capd --help`, and it draws boxes into pipes.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print versions and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --version: as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback when something fails.")] = False,
) -> None:
    """Capture the tensors of a running training job into Zarr, bit for bit."""
    ctx.obj["debug"] = debug
    if version:
        from capd.cli.output import print_either, versions

        found = versions()
        print_either(found, [f"{name} {value}" for name, value in found.items()], as_json=as_json)
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(2)


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line and exit. An error becomes one line on stderr and the exit code of its class."""
    # A terminal with few characters gets the others as numbers.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    # The root callback sets it.
    state = {"debug": False}
    try:
        typer.main.get_command(app).main(args=args, prog_name="capd", obj=state)
    except KeyboardInterrupt:
        _exit(130)
    except CapdError as error:
        _fail(str(error), exit_code_of(error), state["debug"])
    except OSError as error:
        _fail(str(error), 1, state["debug"])
    except Exception as error:
        _fail(f"internal error: {type(error).__name__}: {error} (see `capd --debug …`)", 1, state["debug"])
    _exit(0)


def _fail(message: str, code: int, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    # A message may have names from a store, which may come from anybody.
    print(f"capd: {printable(' '.join(message.split()))}", file=sys.stderr)
    _exit(code)


def _exit(code: int) -> NoReturn:
    raise SystemExit(code)


if __name__ == "__main__":
    main()
