"""The options that several verbs share: what `run` and `plan` hand on to a job, and where the store is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Command", "Config", "Mode", "Policy", "QuantType", "SliceOfRows", "Steps", "StoreRoot"]

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
