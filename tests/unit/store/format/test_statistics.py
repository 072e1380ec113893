"""Statistics against a plain float64 computation on values converted by numpy and ml_dtypes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from capd.store.format.dtypes import stored_type, to_values
from capd.store.format.frames import StatsRow
from capd.store.format.statistics import merge, merge_stats, public, summarise, summarise_rows

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "int64", "int32", "int16", "int8", "uint8", "uint16", "bool",
]  # fmt: skip


def sample(dtype: str, seed: int = 0) -> tuple[NDArray[np.generic], NDArray[np.float64]]:
    """Stored bits and float64 values of a tensor of every kind of element of `dtype`."""
    real = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if real.itemsize == 1 and dtype != "bool":
        bits = np.tile(np.arange(256, dtype=np.uint8), 5)
        elements = bits.view(real) if dtype.startswith("float8") else bits[:1000].view(real)
    else:
        wide = np.random.default_rng(seed).standard_normal(700) * 100
        wide[:20] = 0
        if dtype.startswith(("float", "bfloat")):
            wide[20:24] = [np.nan, np.inf, -np.inf, -0.0]
            wide[24] = 1e30
            wide[25] = 1e-42
        with np.errstate(all="ignore"):  # 1e30 overflows the narrow formats
            elements = (np.abs(wide) if dtype.startswith("u") else wide).astype(real)
    return elements.view(stored_type(dtype).stored), elements.astype(np.float64)


def reference(values: NDArray[np.float64]) -> dict[str, float]:
    finite = values[np.isfinite(values)]
    return {
        "count": values.size,
        "nan": np.isnan(values).sum(),
        "inf": np.isinf(values).sum(),
        "zero": (values == 0).sum(),
        "min": finite.min(),
        "max": finite.max(),
        "absmax": np.abs(finite).max(),
        "mean": finite.mean(),
        "std": finite.std(),
        "sum": finite.sum(),
        "sum_sq": np.square(finite).sum(),
    }


def exponents(values: NDArray[np.float64]) -> dict[int, int]:
    with np.errstate(all="ignore"):
        fields = values.astype(np.float32).view(np.uint32) >> 23 & 0xFF
    fields = np.where(np.isfinite(values) & (fields == 255), 254, fields)
    return {int(b): int(n) for b, n in zip(*np.unique(fields, return_counts=True), strict=True)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vectorised", [False, True])
def test_statistics_equal_a_plain_float64_computation(dtype: str, vectorised: bool) -> None:
    bits, values = sample(dtype)

    row = summarise_rows(bits[None], dtype)[0] if vectorised else summarise(bits, dtype)

    stats = public(row)
    for name, expected in reference(values).items():
        assert getattr(stats, name) == pytest.approx(expected, rel=1e-9, abs=1e-300), name
    assert stats.exponent_histogram == exponents(values)
    assert np.array_equal(to_values(bits, dtype).astype(np.float64), values, equal_nan=True)


def test_packed_fp4_counts_both_values_of_a_byte() -> None:
    bits = np.array([0x71, 0x08], dtype=np.uint8)  # 0.5 and 6.0; -0 and 0

    stats = public(summarise(bits, "float4_e2m1fn_x2"))

    assert (stats.count, stats.zero, stats.min, stats.max, stats.sum) == (4, 2, 0.0, 6.0, 6.5)
    assert to_values(bits, "float4_e2m1fn_x2").tolist() == [0.5, 6.0, -0.0, 0.0]


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (2, 0, 3), (2, 3)])
def test_unpacking_fp4_doubles_the_last_axis_alone(shape: tuple[int, ...]) -> None:
    values = to_values(np.zeros(shape, dtype=np.uint8), "float4_e2m1fn_x2")

    assert values.shape == (*shape[:-1], 2 * shape[-1] if shape else 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merging_parts_equals_the_whole(dtype: str) -> None:
    bits, _ = sample(dtype)
    cut = 137

    parts = merge(summarise(bits[:cut], dtype), summarise(bits[cut:], dtype))

    whole = summarise(bits, dtype)
    for name in StatsRow.__struct_fields__:
        # The cubes of both signs cancel: the error is one of their magnitudes, which are below the fourth powers'.
        within = 1e-12 * whole.sum_fourth if name == "sum_cube" else None
        assert getattr(parts, name) == pytest.approx(
            getattr(whole, name), rel=1e-12, abs=within, nan_ok=True
        ), name


def test_parts_with_different_means_merge_to_the_pooled_std() -> None:
    a, b = np.full(1000, 0.0, "f4"), np.full(1000, 10.0, "f4")

    stats = public(merge(summarise(a, "float32"), summarise(b, "float32")))

    assert (stats.mean, stats.std) == (5.0, 5.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_as_users_read_them_merge_to_those_of_the_whole(dtype: str) -> None:
    bits, _ = sample(dtype)
    parts = [public(summarise(part, dtype)) for part in (bits[:137], bits[137:137], bits[137:])]

    merged = merge_stats(parts)

    whole = public(summarise(bits, dtype))
    assert merged.exponent_histogram == whole.exponent_histogram
    for name in ("count", "nan", "inf", "zero", "min", "max", "absmax"):
        assert getattr(merged, name) == getattr(whole, name), name
    for name in ("sum", "sum_sq", "mean", "std"):
        assert getattr(merged, name) == pytest.approx(getattr(whole, name), rel=1e-9, nan_ok=True), name
    assert merge_stats([]) == public(StatsRow())


def test_merged_sums_do_not_depend_on_the_order_of_the_records() -> None:
    rng = np.random.default_rng(0)
    values = (rng.normal(size=(30, 500)) * 10.0 ** rng.integers(-12, 12, (30, 1))).astype("f4")
    parts = [public(summarise(row, "float32")) for row in values]

    assert merge_stats(parts) == merge_stats(parts[::-1])
    assert merge_stats(parts).sum == math.fsum(part.sum for part in parts)


def test_fp16_sums_do_not_overflow() -> None:
    stats = public(summarise(np.full(100_000, 60_000, "f2"), "float16"))

    assert stats.sum == pytest.approx(100_000 * np.float64(np.float16(60_000)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64"])
def test_an_empty_record_has_no_extremes(dtype: str) -> None:
    stats = public(summarise(np.empty((0, 4), stored_type(dtype).stored), dtype))

    assert (stats.count, stats.min, stats.max, stats.mean, stats.exponent_histogram) == (
        0,
        None,
        None,
        None,
        {},
    )
    assert summarise_rows(np.empty((3, 0), stored_type(dtype).stored), dtype) == [StatsRow()] * 3


def test_a_normal_distribution_has_a_kurtosis_of_three_and_a_constant_has_none() -> None:
    normal = np.random.default_rng(3).standard_normal(1 << 20).astype("f4")

    stats, shifted = public(summarise(normal, "float32")), public(summarise(normal + 5, "float32"))

    wide = normal.astype(np.float64)
    expected = ((wide - wide.mean()) ** 4).mean() / wide.var() ** 2
    assert stats.kurtosis == pytest.approx(expected, rel=1e-9)
    assert shifted.kurtosis == pytest.approx(stats.kurtosis, rel=1e-5)
    assert stats.kurtosis == pytest.approx(3, abs=0.02)
    assert public(summarise(np.full(9, 3.5, "f4"), "float32")).kurtosis is None
    assert public(summarise(np.zeros(9, "f4"), "float32")).kurtosis is None
    assert public(summarise(np.array([1.0, -1.0], "f4"), "float32")).kurtosis == 1


def test_the_crest_factor_of_one_outlier_is_the_root_of_the_count() -> None:
    single = np.zeros(400, "f4")
    single[7] = -3

    assert public(summarise(single, "float32")).crest == pytest.approx(20)
    assert public(summarise(np.full(5, -2.0, "f4"), "float32")).crest == 1
    assert public(summarise(np.zeros(5, "f4"), "float32")).crest is None
    assert public(summarise(np.array([np.nan, np.inf], "f4"), "float32")).crest is None


def test_a_row_of_version_1_has_no_kurtosis() -> None:
    row = summarise(np.arange(9, dtype="f4"), "float32")
    row.sum_cube = row.sum_fourth = 0.0

    assert public(row).kurtosis is None
    assert public(row).crest is not None


def test_rows_of_both_versions_merge_to_no_kurtosis_instead_of_a_wrong_one() -> None:
    new = summarise(np.random.default_rng(0).standard_normal(4096).astype("f4"), "float32")
    old = replace(new, sum_cube=0.0, sum_fourth=0.0)

    for rows in ((new, old), (old, new), (new, old, new), (old, old)):
        merged = merge_stats(map(public, rows))
        assert merged.count == 4096 * len(rows)
        assert (merged.kurtosis, merged.sum_fourth, merged.sum_cube) == (None, 0.0, 0.0)
    zeros = summarise(np.zeros(4096, "f4"), "float32")
    assert merge_stats(map(public, (new, zeros))).kurtosis == pytest.approx(6, rel=0.05)


def test_values_whose_variance_has_no_square_in_float64_have_no_kurtosis() -> None:
    values = np.zeros(1 << 20)
    values[0] = 1e-80

    assert public(summarise(values, "float64")).kurtosis is None


@pytest.mark.parametrize("name", ["sum", "sum_sq", "sum_cube", "sum_fourth"])
def test_sums_that_are_no_numbers_give_no_kurtosis(name: str) -> None:
    row = summarise(np.arange(9, dtype="f4"), "float32")

    assert public(replace(row, **{name: math.nan})).kurtosis is None
