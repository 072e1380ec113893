"""How values use HiFloat8, against en_dtypes on the same values, one at a time where that says it."""

from __future__ import annotations

import math

import en_dtypes
import numpy as np
import pytest

from capd.analyze.distribution import Distribution, distribution_of
from capd.analyze.hif8_regimes import (
    BESIDE,
    FINITE_CODES,
    REGIMES,
    ExponentErrors,
    Hif8Use,
    exponent_errors,
    hif8_use,
)
from capd.formats import qdq
from capd.store.format.dtypes import value_table

RNG = np.random.default_rng(12)
WIDE = (RNG.normal(size=60_000) * np.exp2(RNG.integers(-30, 18, 60_000))).astype(np.float32)


def bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves: bfloat16 patterns of values that are cut off there."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def use_of(bits: np.ndarray, dtype: str = "bfloat16") -> Hif8Use:
    return hif8_use(distribution_of(bits, dtype))


def by_name(use: Hif8Use) -> dict[str, int]:
    return {regime.name: regime.count for regime in use.regimes}


def dot_of(code: int) -> str:
    """D of a code by the paper's prefix: the highest bits behind the sign."""
    magnitude = code & 0x7F
    if magnitude == 0:
        return "zero"
    if magnitude == 0x6F:
        return "overflow"
    for name, prefix, width in (
        ("4", 0b11, 2),
        ("3", 0b10, 2),
        ("2", 0b01, 2),
        ("1", 0b001, 3),
        ("0", 0b0001, 4),
    ):
        if magnitude >> (7 - width) == prefix:
            return name
    return "DML"


def test_every_code_counts_for_the_regime_that_its_prefix_says() -> None:
    values = np.arange(256, dtype=np.uint8).view(en_dtypes.hifloat8).astype(np.float32)
    finite = np.flatnonzero(np.isfinite(values))

    use = use_of(bf16(values[finite]))

    assert (use.finite, use.codes_used, FINITE_CODES) == (253, 253, 253)
    assert use.codes[finite].tolist() == [1] * 253
    expected = {"underflow": 0, "overflow": 0, "zero": 0, **dict.fromkeys(REGIMES, 0)}
    for code in finite:
        expected[dot_of(int(code))] += 1
    assert by_name(use) == expected
    codes = {
        regime.name: (regime.codes, regime.codes_used) for regime in use.regimes if regime.name in REGIMES
    }
    assert codes == {name: (expected[name], expected[name]) for name in REGIMES}
    assert use.entropy_bits == pytest.approx(math.log2(253), rel=1e-12)
    assert (use.errors.mae, use.errors.sqnr_db) == (0, math.inf)


def test_codes_errors_and_shares_are_those_of_the_values_one_by_one() -> None:
    bits = bf16(WIDE)
    values = value_table("bfloat16")[bits]

    use = use_of(bits)

    cast = values.astype(np.float32).astype(en_dtypes.hifloat8)
    codes, found = cast.view(np.uint8), cast.astype(np.float64)
    assert use.codes.tolist() == np.bincount(codes, minlength=256).tolist()
    kept = np.isfinite(found)
    d = found[kept] - values[kept]
    assert use.errors.count == kept.sum()
    assert use.errors.mae == pytest.approx(np.abs(d).mean(), rel=1e-12)
    assert use.errors.relative == pytest.approx(np.abs(d).sum() / np.abs(values[kept]).sum(), rel=1e-12)
    sqnr = 10 * np.log10((values[kept] ** 2).sum() / (d**2).sum())
    assert use.errors.sqnr_db == pytest.approx(sqnr, rel=1e-9)
    names = np.array([dot_of(int(code)) for code in codes], dtype=object)
    names[(codes == 0) & (values != 0)] = "underflow"
    for regime in use.regimes:
        here = names == regime.name
        assert regime.count == here.sum() > 0 or regime.name == "zero"
        assert regime.share == here.sum() / values.size
        if regime.name in REGIMES:
            error = np.abs(found[here] - values[here]).sum() / np.abs(values[here]).sum()
            assert regime.errors.relative == pytest.approx(error, rel=1e-12)
    assert sum(regime.count for regime in use.regimes) == use.finite == values.size


def test_the_ends_of_the_range_are_underflow_and_overflow() -> None:
    edge = np.array([0, -0.0, 2**-23, 2**-23 * (1 - 2**-8), 40960 - 128, 40960, -1e30], np.float32)

    found = by_name(use_of(bf16(edge)))

    assert {name: count for name, count in found.items() if count} == {
        "zero": 2, "underflow": 1, "DML": 1, "4": 1, "overflow": 2,
    }  # fmt: skip


def test_nan_and_inf_are_in_nothing_and_no_element_is_no_error() -> None:
    nothing = use_of(np.array([0x7FC0, 0x7F80, 0xFF80], np.uint16))

    assert (nothing.finite, nothing.codes_used, nothing.entropy_bits) == (0, 0, None)
    assert nothing.codes.sum() == 0
    assert (nothing.errors.mae, nothing.errors.relative, nothing.errors.sqnr_db) == (None, None, None)
    assert {regime.share for regime in nothing.regimes} == {0.0}
    empty = hif8_use(Distribution())
    assert (empty.finite, empty.codes_used) == (0, 0)
    assert exponent_errors(Distribution()).exponents == []


def test_parts_merged_give_what_the_whole_gives() -> None:
    parts = [bf16(WIDE[at : at + 7_001]) for at in range(0, WIDE.size, 7_001)]
    merged = Distribution()
    for part in reversed(parts):
        merged.add(distribution_of(part, "bfloat16"))
    merged.add(distribution_of(np.array([0.1, 60000], np.float16), "float16"))
    whole = distribution_of(bf16(WIDE), "bfloat16")
    whole.add(distribution_of(np.array([0.1, 60000], np.float16), "float16"))

    one, other = hif8_use(merged), hif8_use(whole)

    assert one.regimes == other.regimes
    assert np.array_equal(one.codes, other.codes)
    assert (one.errors, one.exact) == (other.errors, True)
    assert exponent_errors(merged) == exponent_errors(whole)


def test_what_was_rounded_before_it_was_counted_is_said() -> None:
    assert not use_of(np.array([0.1], np.float32), "float32").exact


def expected_errors(values: np.ndarray, label: str) -> np.ndarray:
    import torch

    fmt, options = BESIDE[label]
    found = qdq(torch.from_numpy(values.astype(np.float32)), fmt, **options, overflow="inf")
    return found.double().numpy() - values


@pytest.mark.parametrize("label", BESIDE)
def test_errors_by_exponent_are_those_of_the_values_of_each_binade(label: str) -> None:
    bits = bf16(WIDE)
    values = value_table("bfloat16")[bits]
    values = values[values != 0]

    found: ExponentErrors = exponent_errors(distribution_of(bits, "bfloat16"))

    d = expected_errors(values, label)
    binades = np.floor(np.log2(np.abs(values))).astype(int)
    assert found.exponents == sorted(set(binades.tolist()))
    for at, exponent in enumerate(found.exponents):
        here = binades == exponent
        kept = here & np.isfinite(d)
        sums = found.errors[label][at]
        assert found.counts[at] == here.sum()
        assert sums.count == kept.sum()
        if kept.any():
            relative = np.abs(d[kept]).sum() / np.abs(values[kept]).sum()
            assert sums.relative == pytest.approx(relative, rel=1e-12, abs=1e-300)
        else:
            assert (sums.mae, sums.relative) == (None, None)


def test_precision_falls_with_the_regime_as_the_mantissa_does() -> None:
    """A uniform mantissa has a relative error near 2^-bits / 6 * log2(e), which doubles with each bit less."""
    use = use_of(bf16(WIDE))

    errors = {regime.name: regime.errors.relative or 0 for regime in use.regimes}
    bits = {regime.name: regime.mantissa_bits for regime in use.regimes}
    assert bits == {
        "zero": None, "underflow": None, "DML": 0, "0": 3, "1": 3, "2": 3, "3": 2, "4": 1, "overflow": None,
    }  # fmt: skip
    assert errors["3"] / errors["2"] == pytest.approx(2, rel=0.1)
    assert errors["4"] / errors["3"] == pytest.approx(2, rel=0.1)
    assert errors["underflow"] == 1
