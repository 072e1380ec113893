"""The options that several verbs share: options that `run` and `plan` hand to a job, and the store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "Command", "Config", "ControlIter", "Json", "LabelOnly", "MicroBatches", "Mode", "Policy", "QuantType",
    "QuantTypes", "Require", "RunMode", "SliceOfRows", "StableFor", "Steps", "StoreRoot", "Timeout", "Until",
    "Variables", "Yes", "flag", "option",
]  # fmt: skip

# The heading of the collections' options in docs/cli.md.
_COLLECTIONS = "Collections"


def option(name: str, value: str, text: str, *names: str, **more: Any) -> Any:
    """Declare an option with a value.

    Args:
        name: The option, such as "--out".
        value: The name of its value in the help, such as "DIR".
        text: The help.
        names: Other names, such as "-o".
        more: Further arguments of `typer.Option`.

    Returns:
        The declaration, for the `Annotated` type of a parameter.
    """
    return typer.Option(name, *names, metavar=value, help=text, **more)


def flag(name: str, text: str, *names: str, **more: Any) -> Any:
    """Declare an option without a value. The arguments are the same as those of `option`."""
    return typer.Option(name, *names, help=text, **more)


Json = Annotated[bool, flag("--json", "Print JSON.")]
Command = Annotated[list[str], typer.Argument(metavar="-- CMD…", help="The job and its arguments.")]
StoreRoot = Annotated[
    Path | None, option("--store", "DIR", "Directory that holds the runs [default: captures].")
]
Config = Annotated[
    Path | None,
    option("--config", "FILE", "Settings file [default: CAPD_CONFIG, or ./capd.toml if it exists]."),
]
Policy = Annotated[
    str | None,
    option("--policy", "POLICY", "If there is no room: drop, block, thin or stats [default: block]."),
]
Mode = Annotated[
    str | None, option("--mode", "MODE", "What to keep: tensor, stats or sample:1/N [default: tensor].")
]
Steps = Annotated[
    str | None,
    option("--steps", "RANGE", 'Training steps to capture: "0-2,100-:100" or "all" [default: the first].'),
]
SliceOfRows = Annotated[
    str | None,
    option("--slice", "SLICE", "Rows of activations: first:64, stride:8, tokens:0-127 [default: all]."),
]
QuantType = Annotated[str | None, option("--quant-type", "WORD", "Label of the captures, such as mxfp8.")]

# The following options belong to `capd run` only.
RunMode = Annotated[
    str | None,
    option(
        "--mode",
        "MODE",
        "What to keep: tensor, stats or sample:1/N [default: tensor]. Or a collection: single, batch or quick.",
    ),
]
QuantTypes = Annotated[
    str | None,
    option(
        "--quant-type",
        "TYPE",
        "Number format in which the job's models compute, such as mxfp8, and label of the captures. Another word "
        "is only a label. A collection takes several: T,T,… [default: mxfp8, or four types in batch].",
    ),
]
LabelOnly = Annotated[bool, flag("--label-only", "Emulate nothing: --quant-type is only a label.")]
ControlIter = Annotated[
    int | None,
    option(
        "--control-iter",
        "N",
        "Micro-batches to keep of each type; 0: all, within a byte budget [default: 1].",
        "--control-micro-batches",
        min=0,
        rich_help_panel=_COLLECTIONS,
    ),
]
MicroBatches = Annotated[
    int | None,
    option(
        "--collect-micro-batches",
        "M",
        "Micro-batches of one iteration, at most [default: 1].",
        min=1,
        rich_help_panel=_COLLECTIONS,
    ),
]
Until = Annotated[
    str | None,
    option(
        "--until",
        "complete|stable",
        "End a job when every rank has its micro-batches, or also when no more arrive [default: complete].",
        rich_help_panel=_COLLECTIONS,
    ),
]
StableFor = Annotated[
    str | None,
    option(
        "--stable-for",
        "TIME",
        "How long to wait for more, or for ranks without captures: 90, 60s, 15m, 1.5h [default: 60s].",
        rich_help_panel=_COLLECTIONS,
    ),
]
Timeout = Annotated[
    str | None,
    option(
        "--timeout",
        "TIME",
        "End a type's job then, and do not count it as collected; 0: never [default: 15m].",
        rich_help_panel=_COLLECTIONS,
    ),
]
Variables = Annotated[
    list[str] | None,
    option(
        "--env", "K=V", "A variable of the job. May be given several times.", rich_help_panel=_COLLECTIONS
    ),
]
Require = Annotated[
    list[str] | None,
    option(
        "--require",
        "PATH",
        "Data that must exist before anything starts: a file, a directory, or a prefix with .bin and .idx. May be "
        "given several times.",
        rich_help_panel=_COLLECTIONS,
    ),
]
Yes = Annotated[
    bool, flag("--yes", "Allow --control-iter 0 without a byte budget.", rich_help_panel=_COLLECTIONS)
]
