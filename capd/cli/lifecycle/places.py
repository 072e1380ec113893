"""The runs and store roots that the commands about whole runs are given, and the daemons that have them open."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from capd.cli.completion import run_words, store_roots
from capd.cli.options import flag, local_path
from capd.cli.output import note
from capd.cli.stores import default_store, is_run
from capd.errors import ConfigError, EndpointError
from capd_client.process.text import printable

__all__ = [
    "RootArgument",
    "RunsArgument",
    "Yes",
    "ask_for",
    "named_runs",
    "released",
    "root_of",
    "say_failed",
]

RootArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[STORE]",
        help="The directory of runs. Default: CAPD_STORE, or store in capd.toml, or captures.",
        show_default=False,
        parser=local_path,
        autocompletion=store_roots,
    ),
]
RunsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN…",
        help="Runs: paths, or names in the default store.",
        show_default=False,
        autocompletion=run_words,
    ),
]
Yes = Annotated[bool, flag("--yes", "Do it. Without this option, nothing is changed.", "-y")]


def root_of(store: Path | None) -> Path:
    """Return the directory of runs that STORE names. Raises ConfigError if it is a run."""
    root = default_store() if store is None else store
    if is_run(root):
        raise ConfigError(f"{root} is a run; name its directory: {root.absolute().parent}")
    return root


def named_runs(words: list[str]) -> list[Path]:
    """Return the paths of runs: a word without a slash that is no path here is a name in the default store."""
    return list({path.absolute(): path for path in map(_path_of, words)}.values())


def _path_of(word: str) -> Path:
    path = local_path(word)
    if "/" not in word and not path.exists() and not path.is_symlink():
        return default_store() / f"{word.removesuffix('.zarr')}.zarr"
    # `rm x.zarr/..` or `rm .` never names a run.
    return path if path.name not in ("", "..") else path.resolve()


def released(run: Path) -> bool:
    """Ask the daemons of this machine that have a run open to let it go. Return False if one does not."""
    from capd.server.net.daemon_client import connect
    from capd.server.runs.root_lock import owner_of
    from capd.store.disk.layout import nodes_of
    from capd_client.protocol.control import Control

    root = run.absolute().parent
    for node in nodes_of(run):
        endpoint = owner_of(root, node).endpoint
        if not endpoint:
            continue
        try:
            with connect(Path(endpoint.removeprefix("unix:"))) as tool:
                reply = tool.control(Control("release", run.name.removesuffix(".zarr")), 30.0)
        except EndpointError as error:
            note(f"the daemon of node {node} may have {run} open: {error}")
            continue
        if not reply.ok:
            note(f"the daemon of node {node} has {run} open: {reply.message}")
            return False
    return True


def ask_for(names: list[str], kind: str) -> bool:
    """Ask the person at the terminal to type what is to be removed. Return False without a terminal.

    Args:
        names: What is to be removed: one is named, several are counted.
        kind: "run" or "series".
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    wanted = names[0] if len(names) == 1 else str(len(names))
    plural = kind if kind == "series" else f"{kind}s"
    what = f"the name of the {kind}" if len(names) == 1 else f"the number of {plural}"
    print(f"type {what} ({printable(wanted)}) to remove: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() == wanted


def say_failed(place: Path, error: Exception) -> None:
    """Say that something stays, and why."""
    note(f"{place} stays: {error}")
