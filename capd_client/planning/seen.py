"""The document of one planned rank, which `capd plan` reads: a JSON file per process. No torch."""

from __future__ import annotations

from typing import Optional

import msgspec

from capd_client.protocol.key import Key

__all__ = ["Calls", "IterationSeen", "RankSeen", "SeriesSeen"]


class Calls(msgspec.Struct, array_like=True, frozen=True):
    """Equal offers of one series in one iteration.

    Args:
        ordinal: The sum of micro-batch and call, which decides in mode sample:1/N.
        shape: The shape of each tensor, after slicing.
        nbytes: The bytes of each tensor, after slicing.
        count: The number of the offers.
    """

    ordinal: int
    shape: tuple[int, ...]
    nbytes: int
    count: int


class SeriesSeen(msgspec.Struct):
    """A series that the job would make.

    Args:
        key: The key of the series.
        dtype: The dtype of the records.
        payload: Whether tensors are kept, not only statistics.
        device: The device of the tensors.
        steps: The steps that its `watch` selects; None for captures that the job makes itself.
        once: Whether a step has at most one record, of the first call that is kept.
        iterations: The offers, by iteration.
        besides: The steps in which the tensors are kept, for statistics that are kept in the other steps.
    """

    key: Key
    dtype: str
    payload: bool
    device: str
    steps: Optional[str]
    once: bool
    iterations: dict[int, list[Calls]]
    besides: str = ""


class IterationSeen(msgspec.Struct):
    """An iteration that was planned. `seconds` is its duration until the next one began; None: it is not over."""

    iteration: int
    seconds: Optional[float] = None


class RankSeen(msgspec.Struct, kw_only=True):
    """The document of one process. Sizes are in bytes.

    Args:
        state: "running", "complete" (all requested iterations were planned), or "ended" (with the job).
        refused: Drop reason → number of offers that could not be captured.
        link_bytes_per_s: The speed of the link, measured as `link_how` says.
        cut_short: The reason why the last iteration is incomplete; "" if it is complete.
    """

    rank: int
    world_size: int
    local_world_size: int
    host: str
    pid: int
    state: str
    iterations: list[IterationSeen]
    series: list[SeriesSeen]
    refused: dict[str, int]
    sample_every: int
    policy: str
    max_step_nbytes: Optional[int]
    arena_nbytes: int
    ring_nbytes: Optional[int]
    link_bytes_per_s: Optional[float]
    link_how: str
    cut_short: str = ""
