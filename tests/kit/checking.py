"""Compares a store with what the ranks captured: exact tensors, dense prefixes, no duplicates."""

from __future__ import annotations

from pathlib import Path

import torch

import capd
from tests.kit import content


def captured_numbers(run: Path, rank: int) -> list[int]:
    """Numbers of all captures of a rank in the store, each read back and compared bit for bit; sorted."""
    found: list[int] = []
    for series in capd.open(run).find(rank=rank, attempt="all"):
        for i, record in enumerate(series.records):
            expected = content.tensor(rank, record.iteration)
            held = series.torch(i)
            assert held.dtype == expected.dtype
            assert held.shape == expected.shape
            assert _bytes(held) == _bytes(expected)
            assert series.key.tensor_name == content.name(record.iteration)
            found.append(record.iteration)
    assert len(found) == len(set(found)), "a capture is in the store twice"
    return sorted(found)


def listed_numbers(run: Path, rank: int) -> list[int]:
    """Numbers of all captures of a rank that the store lists, sorted; their elements are not read."""
    series = capd.open(run).find(rank=rank, attempt="all")
    return sorted(record.iteration for one in series for record in one.records)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_balanced(counters: dict[str, object]) -> None:
    """P1 at rest: offered = committed + dropped + in flight, and nothing in flight."""
    dropped = counters["dropped"]
    assert isinstance(dropped, dict)
    assert counters["in_flight"] == 0
    assert counters["offered"] == counters["committed"] + sum(dropped.values())  # type: ignore[operator]
