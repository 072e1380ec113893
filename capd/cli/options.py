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
    Path | None, typer.Option("--store", help="Directory that holds the runs [default: captures].")
]
Config = Annotated[
    Path | None,
    typer.Option("--config", help="Settings file [default: CAPD_CONFIG, else ./capd.toml, if there is one]."),
]
Policy = Annotated[
    str | None,
    typer.Option("--policy", help="When there is no room: drop, block, thin or stats [default: block]."),
]
Mode = Annotated[
    str | None, typer.Option("--mode", help="What is kept: tensor, stats or sample:1/N [default: tensor].")
]
Steps = Annotated[
    str | None,
    typer.Option("--steps", help='Training steps that watch captures, "0-2,100-:100" or "all".'),
]
SliceOfRows = Annotated[
    str | None,
    typer.Option("--slice", help="Rows of activations: first:64, stride:8, tokens:0-127 [default: all]."),
]
QuantType = Annotated[str | None, typer.Option("--quant-type", help="Label of the captures, such as mxfp8.")]

# Of `capd run` alone.
RunMode = Annotated[
    str | None,
    typer.Option(
        "--mode",
        help="What is kept: tensor, stats or sample:1/N [default: tensor]. Or a collection: single, batch or quick.",
    ),
]
QuantTypes = Annotated[
    str | None,
    typer.Option(
        "--quant-type",
        help="Number format that the job's models compute in, such as mxfp8, and label of the captures; another word "
        "is a label alone. Of a collection T[,T…] [default: mxfp8, four in batch].",
    ),
]
LabelOnly = Annotated[
    bool,
    typer.Option("--label-only", help="Emulate nothing: --quant-type is a label of what the job computes."),
]
ControlIter = Annotated[
    int | None,
    typer.Option(
        "--control-iter",
        "--control-micro-batches",
        min=0,
        metavar="N",
        help="Micro-batches that are kept of each type; 0: all [default: 1].",
        rich_help_panel=_COLLECTIONS,
    ),
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        "--collect-micro-batches",
        min=1,
        metavar="M",
        help="At most that many of one iteration [default: 1].",
        rich_help_panel=_COLLECTIONS,
    ),
]
Until = Annotated[
    str | None,
    typer.Option(
        "--until",
        metavar="complete|stable",
        help="End a job when it has all, or also when no more comes [default: complete].",
        rich_help_panel=_COLLECTIONS,
    ),
]
StableFor = Annotated[
    str | None,
    typer.Option(
        "--stable-for",
        metavar="TIME",
        help="How long nothing may have come [default: 60s].",
        rich_help_panel=_COLLECTIONS,
    ),
]
Timeout = Annotated[
    str | None,
    typer.Option(
        "--timeout",
        metavar="TIME",
        help="End a type's job in any case; 0: never [default: 15m].",
        rich_help_panel=_COLLECTIONS,
    ),
]
Variables = Annotated[
    list[str] | None,
    typer.Option(
        "--env", metavar="K=V", help="A variable of the job; repeatable.", rich_help_panel=_COLLECTIONS
    ),
]
Require = Annotated[
    list[str] | None,
    typer.Option(
        "--require",
        metavar="PATH",
        help="Data that must be there before anything starts; repeatable.",
        rich_help_panel=_COLLECTIONS,
    ),
]
Yes = Annotated[
    bool,
    typer.Option("--yes", help="With --control-iter 0: without a byte budget.", rich_help_panel=_COLLECTIONS),
]
