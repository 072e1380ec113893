"""What one rank saw while it was planned, as it is handed to `capd plan`: a JSON file per process. No torch."""

from __future__ import annotations

from typing import Optional

import msgspec

from capd_client.protocol.key import Key

__all__ = ["Calls", "IterationSeen", "RankSeen", "SeriesSeen"]


class Calls(msgspec.Struct, array_like=True, frozen=True):
    """`count` offers of one series in one iteration that are alike.

    ordinal: micro-batch + call, of which mode sample:1/N asks. shape, nbytes: of each, as a tensor, slices taken.
    """

    ordinal: int
    shape: tuple[int, ...]
    nbytes: int
    count: int


class SeriesSeen(msgspec.Struct):
    """A series that would be made.

    payload: tensors are kept, not statistics alone. device: where the tensors lie. steps: what its `watch` captures,
    None for captures that the job makes itself. once: at most one record per step, of the first call that is kept.
    iterations: by iteration, what was offered. besides: of statistics that are kept where the tensors are not, the
    steps in which the tensors are.
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
    """An iteration that was planned. seconds: until the next one began; None: it was not over yet."""

    iteration: int
    seconds: Optional[float] = None


class RankSeen(msgspec.Struct, kw_only=True):
    """One process. state: "running", "complete" (all iterations that were asked for), or "ended" (its job did).

    refused: drop reason → offers that could not be captured. Sizes in bytes, link_bytes_per_s as `link_how` says.
    cut_short: why no more of the last iteration was planned; "" where all of it was.
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
