"""Ranges of the formats, and what of some values lies outside of them, against numpy and the packages' own limits."""

from __future__ import annotations

import en_dtypes
import ml_dtypes
import numpy as np
import pytest

from capd.analyze.distribution import Distribution, distribution_of
from capd.analyze.grids import Grid, grid_of, grids, overflow_of, severity
from capd.store.format.dtypes import value_table

PACKAGED = {
    "hifp8": en_dtypes.hifloat8, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn, "e2m3": ml_dtypes.float6_e2m3fn, "e2m1": ml_dtypes.float4_e2m1fn,
}  # fmt: skip


def positive_values(label: str) -> np.ndarray:
    """All finite positive values, as the package that has the format decodes them."""
    if label in ("bf16", "fp16"):
        values = value_table({"bf16": "bfloat16", "fp16": "float16"}[label])
    else:
        codes = np.arange(256, dtype=np.uint8)
        kind = PACKAGED[label]
        width = {"e2m1": 16, "e3m2": 64, "e2m3": 64}.get(label, 256)
        values = codes[:width].view(kind).astype(np.float64)
    return np.unique(values[np.isfinite(values) & (values > 0)])


@pytest.mark.parametrize("label", grids())
def test_a_grid_ends_and_steps_as_the_formats_values_do(label: str) -> None:
    grid, values = grids()[label], positive_values(label)

    assert (grid.label, grid.smallest, grid.largest) == (label, values[0], values[-1])
    exponents = np.floor(np.log2(values)).astype(int)
    assert sorted(grid.mantissa_bits) == sorted(set(exponents.tolist()))
    for exponent, bits in grid.mantissa_bits.items():
        here = values[exponents == exponent]
        steps = np.diff(here)
        if steps.size:
            assert set(steps) == {2.0 ** (exponent - bits)}
        elif exponent < 15:  # a largest power of two may stand alone, whatever follows it
            assert bits == 0
    most = 1 if label == "hifp8" else max(grid.mantissa_bits.values())
    assert grid.normal == 2.0 ** min(e for e, bits in grid.mantissa_bits.items() if bits >= most)


def test_a_format_has_the_grid_of_its_elements() -> None:
    assert [grid_of(*one).label for one in (("mxfp8",), ("mxfp8", "e5m2"), ("nvfp4",), ("hifp8",), ("bf16",))] == [
        "e4m3", "e5m2", "e2m1", "hifp8", "bf16",
    ]  # fmt: skip
    with pytest.raises(KeyError):
        grid_of("fp3")


VALUES = np.concatenate(
    [
        np.random.default_rng(3).normal(size=20_000)
        * np.exp2(np.random.default_rng(4).integers(-40, 20, 20_000)),
        [0.0, -0.0, np.nan, np.inf, -np.inf, 448, 449, 2**-9, 2**-10, 2**-6, 32768, 2**-22],
    ]
).astype(np.float32)
BITS = (VALUES.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("label", grids())
@pytest.mark.parametrize("scaled", [False, True])
def test_what_lies_outside_is_what_numpy_finds_there(label: str, scaled: bool) -> None:
    values = value_table("bfloat16")[BITS]
    grid = grids()[label]

    found = overflow_of(
        distribution_of((VALUES.view(np.uint32) >> 16).astype(np.uint16), "bfloat16"), grid, scaled=scaled
    )

    finite = np.abs(values[np.isfinite(values)])
    some = finite / finite.max() * grid.largest if scaled else finite
    assert (found.count, found.nan, found.inf, found.zero) == (values.size, 1, 2, 2)
    assert found.above == (0 if scaled else (finite > grid.largest).sum())
    assert found.below == ((some > 0) & (some < grid.smallest)).sum()
    assert found.flushed == ((some > 0) & (some < grid.normal)).sum()
    assert found.flushed_percent == 100 * found.flushed / values.size


def test_counts_of_parts_add_up_to_those_of_the_whole() -> None:
    merged = Distribution()
    for part in np.array_split(BITS, 7):
        merged.add(distribution_of(part, "bfloat16"))

    for grid in grids().values():
        assert overflow_of(merged, grid) == overflow_of(distribution_of(BITS, "bfloat16"), grid)


def test_no_element_has_no_share() -> None:
    found = overflow_of(Distribution(), grids()["hifp8"])

    assert (found.count, found.above_percent, found.below_percent, found.flushed_percent) == (
        0,
        None,
        None,
        None,
    )
    zeros: Grid = grids()["e4m3"]
    assert overflow_of(distribution_of(np.zeros(3, np.float32), "float32"), zeros, scaled=True).zero == 3


def test_severity_is_tensor_savers() -> None:
    assert [severity(share) for share in (None, 0.0, 1e-9, 0.1, 0.11, 1.0, 1.1)] == [
        "none", "none", "low", "low", "moderate", "moderate", "high",
    ]  # fmt: skip
