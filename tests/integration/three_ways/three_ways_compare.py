"""What the three ways of a row hold, as the same sort of table, and where the tables differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import capd


class Where(NamedTuple):
    """Which record: its series, as far as all ways know it, and its moment."""

    rank: int
    module: str
    layer_type: str
    tensor_name: str
    iteration: int
    micro_batch: int
    call: int


class Held(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    bits: bytes


Records = dict[Where, Held]


def of_store(run: Path) -> Records:
    """All records of a run; fails for one that is there twice."""
    found: Records = {}
    for series in capd.open(run).series:
        key = series.key
        for i, record in enumerate(series.records):
            where = Where(
                key.rank, key.module, key.layer_type, key.tensor_name,
                record.iteration, record.micro_batch, record.call,
            )  # fmt: skip
            assert where not in found, f"twice: {where}"
            tensor = series.torch(i)
            bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[where] = Held(str(tensor.dtype), tuple(tensor.shape), bits)
    return found


def keys_of_store(run: Path) -> set[Any]:
    """The whole keys of all series."""
    return {series.key for series in capd.open(run).series}


def of_oracle(directory: Path, row: str, ranks: int) -> Records:
    """What `three_ways_oracle` left of every rank."""
    found: Records = {}
    for rank in range(ranks):
        path = directory / f"{row}.oracle.{rank}"
        bits = np.load(f"{path}.npz")
        for number, (key, dtype, shape) in enumerate(json.loads(Path(f"{path}.json").read_text())):
            found[Where(rank, *key)] = Held(dtype, tuple(shape), bits[f"arr_{number}"].tobytes())
    return found


def differences(found: Mapping[Where, Held], truth: Mapping[Where, Held]) -> list[str]:
    """What is missing, too much or other in `found`, a line for each; none means equal in every bit."""
    lines = [f"missing: {where}" for where in sorted(truth.keys() - found.keys())]
    lines += [f"too many: {where}" for where in sorted(found.keys() - truth.keys())]
    for where in sorted(truth.keys() & found.keys()):
        mine, its = found[where], truth[where]
        if mine != its:
            same = [where for where, held in truth.items() if held == mine]
            lines.append(f"other: {where} {mine[:2]} for {its[:2]}; it is {same[:1] or 'nobody'}'s")
    return lines
