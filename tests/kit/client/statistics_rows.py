"""Samples of every dtype, and the rows that numpy in float64 and the daemon compute of them."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from capd.store.format.dtypes import stored_type, to_values
from capd.store.format.frames import StatsRow
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.statistics_row import BINS, ROW_FIELDS, ROW_VALUES

__all__ = [
    "RNG",
    "SUMS",
    "Bits",
    "any_bits",
    "assert_row",
    "daemon_row",
    "ordinary",
    "reference",
    "tensor_of",
]

Bits = NDArray[np.generic]
SUMS = [ROW_FIELDS.index("sum"), ROW_FIELDS.index("sum_sq"), BINS.stop, BINS.stop + 1]
RNG = np.random.default_rng(5)


def ordinary(dtype: str, count: int = 3001) -> Bits:
    """Numbers as they come in training, with zeros of both signs among them, as stored bits."""
    if ITEM_NBYTES[dtype] == 1:
        return any_bits(dtype, count)
    wide = RNG.standard_normal(count) * 100
    wide[::7], wide[1::50] = 0, -0.0
    numbers = torch.from_numpy(wide if dtype.startswith(("f", "b")) else np.abs(wide))
    words = numbers.to(getattr(torch, dtype)).view(torch.uint8).numpy()
    return words.view(stored_type(dtype).stored)


def any_bits(dtype: str, count: int = 3001) -> Bits:
    """Any bit pattern: NaN of all kinds, Inf, subnormals, the largest numbers. float64 within ±1e±150."""
    stored = stored_type(dtype).stored
    if dtype == "bool":
        return RNG.integers(0, 2, count).astype(bool)
    if dtype == "float64":
        wide = RNG.standard_normal(count) * 10.0 ** RNG.integers(-150, 150, count)
        wide[:6] = [np.nan, np.inf, -np.inf, 5e-324, -0.0, 3.5e38][:count]
        return wide
    return np.frombuffer(RNG.bytes(count * stored.itemsize), stored)


def tensor_of(bits: Bits, dtype: str) -> torch.Tensor:
    if not bits.size:
        return torch.empty(bits.shape, dtype=getattr(torch, dtype))
    words = torch.frombuffer(bytearray(bits.tobytes()), dtype=torch.uint8)
    return words.view(getattr(torch, dtype)).view(bits.shape)


def reference(bits: Bits, dtype: str) -> NDArray[np.float64]:
    """The row by numpy in float64, its sums exactly rounded."""
    wide = wide_values(bits, dtype)
    finite = wide[np.isfinite(wide)]
    ends = [finite.min(), finite.max(), np.abs(finite).max()] if finite.size else [np.nan] * 3
    head = [wide.size, np.isnan(wide).sum(), np.isinf(wide).sum(), (wide == 0).sum(), *ends]
    with np.errstate(over="ignore", under="ignore"):
        single = finite.astype(np.float32).astype(np.float64)
    exponents = np.where(single == 0, 0, np.clip(np.frexp(single)[1] + 126, 0, 254))
    exponents[np.isinf(single)] = 254
    bins = np.bincount(exponents, minlength=256)
    bins[255] = wide.size - finite.size
    with np.errstate(over="ignore", invalid="ignore"):
        sums = [_sum_of(finite**power) for power in (1, 2, 3, 4)]
    return np.array([*head, *sums[:2], *bins, *sums[2:]])


def _sum_of(terms: NDArray[np.float64]) -> float:
    return math.fsum(terms) if np.isfinite(terms).all() else float(terms.sum())


def wide_values(bits: Bits, dtype: str) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # signalling NaN
        return np.ravel(to_values(bits.reshape(-1), dtype)).astype(np.float64)


def assert_row(row: NDArray[np.float64], expected: NDArray[np.float64], bits: Bits, dtype: str) -> None:
    """Everything but the sums exactly; those to 1e-12 of the sum of magnitudes."""
    wide = wide_values(bits, dtype)
    magnitudes = np.abs(wide[np.isfinite(wide)])
    with np.errstate(over="ignore", invalid="ignore"):
        allowed = 1e-12 * np.array([(magnitudes**power).sum() for power in (1, 2, 3, 4)])
        close = (np.abs(row[SUMS] - expected[SUMS]) <= allowed) | (row[SUMS] == expected[SUMS])
    assert (close | ~np.isfinite(allowed)).all(), (row[SUMS], expected[SUMS])
    exact = np.delete(np.arange(ROW_VALUES), SUMS)
    np.testing.assert_array_equal(row[exact], expected[exact])


def daemon_row(stats: StatsRow) -> NDArray[np.float64]:
    row = np.zeros(ROW_VALUES)
    row[: len(ROW_FIELDS)] = [
        np.nan if value is None else value for value in (getattr(stats, name) for name in ROW_FIELDS)
    ]
    row[BINS.start + np.array(stats.exponents[::2], dtype=np.intp)] = stats.exponents[1::2]
    row[BINS.stop :] = stats.sum_cube, stats.sum_fourth
    return row
