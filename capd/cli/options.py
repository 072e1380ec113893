"""The options that several verbs share: what `run` and `plan` hand on to a job, and where the store is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Command", "Config", "ControlIter", "MicroBatches", "Mode", "Policy", "QuantType", "QuantTypes", "Require",
    "RunMode", "SliceOfRows", "StableFor", "Steps", "StoreRoot", "Timeout", "Until", "Variables", "Yes",
]  # fmt: skip

_COLLECTIONS = "Collections"  # the heading of their options in --help

Command = Annotated[list[str], typer.Argument(metavar="-- CMD…", help="The job and its arguments.")]
StoreRoot = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="Directory that holds the runs [default: captures]."),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="Settings file [default: CAPD_CONFIG, or ./capd.toml if it exists]."
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        "--policy", metavar="POLICY", help="If there is no room: drop, block, thin or stats [default: block]."
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        "--mode", metavar="MODE", help="What to keep: tensor, stats or sample:1/N [default: tensor]."
    ),
]
Steps = Annotated[
    str | None,
    typer.Option(
        "--steps",
        metavar="RANGE",
        help='Training steps to capture: "0-2,100-:100" or "all" [default: the first].',
    ),
]
SliceOfRows = Annotated[
    str | None,
    typer.Option(
        "--slice",
        metavar="SLICE",
        help="Rows of activations: first:64, stride:8, tokens:0-127 [default: all].",
    ),
]
QuantType = Annotated[
    str | None, typer.Option("--quant-type", metavar="WORD", help="Label of the captures, such as mxfp8.")
]

# Of `capd run` alone.
RunMode = Annotated[
    str | None,
    typer.Option(
        "--mode",
        metavar="MODE",
        help="What to keep: tensor, stats or sample:1/N [default: tensor]. Or a collection: single, batch or quick.",
    ),
]
QuantTypes = Annotated[
    str | None,
    typer.Option(
        "--quant-type",
        metavar="TYPE",
        help="Number format in which the job's models compute, such as mxfp8, and label of the captures. Another word "
        "is only a label. A collection takes several: T,T,… [default: mxfp8, or four types in batch].",
    ),
]
LabelOnly = Annotated[
    bool,
    typer.Option("--label-only", help="Emulate nothing: --quant-type is only a label."),
]
ControlIter = Annotated[
    int | None,
    typer.Option(
        "--control-iter",
        "--control-micro-batches",
        min=0,
        metavar="N",
        help="Micro-batches to keep of each type; 0: all, within a byte budget [default: 1].",
        rich_help_panel=_COLLECTIONS,
    ),
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        "--collect-micro-batches",
        min=1,
        metavar="M",
        help="Micro-batches of one iteration, at most [default: 1].",
        rich_help_panel=_COLLECTIONS,
    ),
]
Until = Annotated[
    str | None,
    typer.Option(
        "--until",
        metavar="complete|stable",
        help="End a job when every rank has its micro-batches, or also when no more arrive [default: complete].",
        rich_help_panel=_COLLECTIONS,
    ),
]
StableFor = Annotated[
    str | None,
    typer.Option(
        "--stable-for",
        metavar="TIME",
        help="How long to wait for more, or for ranks without captures: 90, 60s, 15m, 1.5h [default: 60s].",
        rich_help_panel=_COLLECTIONS,
    ),
]
Timeout = Annotated[
    str | None,
    typer.Option(
        "--timeout",
        metavar="TIME",
        help="End a type's job then, and do not count it as collected; 0: never [default: 15m].",
        rich_help_panel=_COLLECTIONS,
    ),
]
Variables = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="K=V",
        help="A variable of the job. May be given several times.",
        rich_help_panel=_COLLECTIONS,
    ),
]
Require = Annotated[
    list[str] | None,
    typer.Option(
        "--require",
        metavar="PATH",
        help="Data that must exist before anything starts: a file, a directory, or a prefix with .bin and .idx. May be "
        "given several times.",
        rich_help_panel=_COLLECTIONS,
    ),
]
Yes = Annotated[
    bool,
    typer.Option("--yes", help="Allow --control-iter 0 without a byte budget.", rich_help_panel=_COLLECTIONS),
]
