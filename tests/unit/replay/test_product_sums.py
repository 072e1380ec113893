"""The sums of one product against numbers computed directly in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from capd.formats import qdq
from capd.replay import exact_product as exact_product_module
from capd.replay.exact_product import exact_product
from capd.replay.product_sums import OperandPair, measure_product
from capd.replay.sums import ProductSums


def _operands(
    rows: int = 96, inner: int = 64, columns: int = 80, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(rows, inner, generator=generator) * scale
    b = torch.randn(inner, columns, generator=generator)
    return a.to(torch.bfloat16), b.to(torch.bfloat16)


def _pair(a: Tensor, b: Tensor, *, of_a: str | None = "mxfp8", of_b: str | None = "mxfp4") -> OperandPair:
    a, b = a.to(torch.float32), b.to(torch.float32)
    return OperandPair(
        (qdq(a, of_a) if of_a else a).__getitem__,
        qdq(b, of_b, axis=0) if of_b else b,
        a.__getitem__ if of_a else None,
        b if of_b else None,
    )


def _direct(a: Tensor, b: Tensor, pair: OperandPair) -> dict[str, float]:
    exact = a.double() @ b.double()
    found = pair.a(slice(None)).double() @ pair.b.double()
    d = found - exact
    rows = 10 * (exact.square().sum(1) / d.square().sum(1)).log10()
    return {
        "sqnr_db": float(10 * (exact.square().sum() / d.square().sum()).log10()),
        "zeta": float(d.norm() / exact.norm()),
        "cosine": float((found * exact).sum() / (found.norm() * exact.norm())),
        "alignment": float((found * exact).sum() / exact.square().sum()),
        "worst": float(rows.min()),
        "worst_row": int(rows.argmin()),
    }


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30], ids=["plain", "tiny", "huge"])
@pytest.mark.parametrize("most", [1 << 31, 0], ids=["float64", "float32"])
def test_the_metrics_are_those_of_float64(scale: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_product_module, "MOST_DOUBLE", most)
    monkeypatch.setattr(exact_product_module, "_BLOCK_VALUES", 1000)
    a, b = _operands(scale=scale)
    pair = _pair(a, b)
    found = measure_product(lambda _: pair, exact_product(a, b), call="a call")
    direct = _direct(a, b, pair)
    assert found.worst is not None
    assert found.sqnr_db == pytest.approx(direct["sqnr_db"], abs=1e-4)
    assert found.zeta == pytest.approx(direct["zeta"], rel=1e-5)
    assert found.cosine == pytest.approx(direct["cosine"], abs=1e-7)
    assert found.alignment == pytest.approx(direct["alignment"], abs=1e-6)
    assert found.worst.sqnr_db == pytest.approx(direct["worst"], abs=1e-4)
    assert (found.worst.call, found.worst.row) == ("a call", direct["worst_row"])
    assert (found.calls, found.values, found.lost, found.nonfinite) == (1, 96 * 80, 0, 0)
    assert found.references == {"float64" if most else "float32"}


def test_untouched_operands_have_no_error() -> None:
    a, b = _operands()
    found = measure_product(
        lambda _: _pair(a, b, of_a=None, of_b=None)._replace(is_exact=True), exact_product(a, b), blame=True
    )
    assert (found.sqnr_db, found.zeta, found.alignment, found.cosine) == (math.inf, 0.0, 1.0, 1.0)
    assert found.worst is None


@pytest.mark.parametrize(("of_a", "of_b", "guilty"), [("mxfp4", None, "a"), (None, "mxfp4", "b")])
def test_the_only_quantised_operand_has_all_the_blame(
    of_a: str | None, of_b: str | None, guilty: str
) -> None:
    a, b = _operands()
    found = measure_product(lambda _: _pair(a, b, of_a=of_a, of_b=of_b), exact_product(a, b), blame=True)
    assert found.blame is not None
    for name, shares in found.blame.shares().items():
        assert shares == {"energy": float(name == guilty), "inner": float(name == guilty)}


def test_the_blame_of_two_operands_is_that_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_product_module, "_BLOCK_VALUES", 1000)
    a, b = _operands()
    pair = _pair(a, b)
    found = measure_product(lambda _: pair, exact_product(a, b), blame=True)
    x, y, qx, qy = (one.double() for one in (a, b, pair.a(slice(None)), pair.b))
    parts = {"a": (qx - x) @ y, "b": x @ (qy - y), "cross": (qx - x) @ (qy - y)}
    d = qx @ qy - x @ y
    assert found.blame is not None
    shares = found.blame.shares()
    for name, part in parts.items():
        assert shares[name]["energy"] == pytest.approx(
            float(part.square().sum() / d.square().sum()), rel=1e-4
        )
        assert shares[name]["inner"] == pytest.approx(float((part * d).sum() / d.square().sum()), abs=1e-5)
    assert sum(one["inner"] or 0.0 for one in shares.values()) == pytest.approx(1, abs=1e-5)


def test_the_mean_of_draws_tells_a_bias_from_noise() -> None:
    a, b = _operands()
    exact = exact_product(a, b)
    x, y = a.float(), b.float()

    def drawn(draw: int, bias: float = 0.0) -> OperandPair:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(draw))
        return OperandPair((x + 0.1 * noise + bias).__getitem__, y, x.__getitem__, None)

    unbiased = measure_product(drawn, exact, draws=16, is_random=True)
    biased = measure_product(lambda draw: drawn(draw, 0.1), exact, draws=16, is_random=True)
    assert unbiased.draws is not None
    assert biased.draws is not None
    assert unbiased.draws.ideal_db == pytest.approx(12.04, abs=0.01)
    assert unbiased.draws.gain_db == pytest.approx(12.04, abs=0.3)
    assert biased.draws.gain_db == pytest.approx(10 * math.log10(2 / (1 + 1 / 16)), abs=0.3)
    each = [measure_product(lambda _, at=at: drawn(at), exact) for at in range(16)]
    mean = sum(pair.a(slice(None)).double() for pair in map(drawn, range(16))) / 16 @ y.double()
    truth = a.double() @ b.double()
    ratio = truth.square().sum() / (mean - truth).square().sum()
    assert unbiased.draws.sqnr_db == pytest.approx(float(10 * ratio.log10()), abs=1e-3)
    assert unbiased.noise == pytest.approx(sum(one.noise for one in each), rel=1e-12)
    assert unbiased.values == 16 * each[0].values


def test_values_that_are_not_finite_are_counted_and_left_out() -> None:
    a, b = _operands()
    a[5, 3] = math.nan
    pair = _pair(a.nan_to_num(0.0), b)
    lost = pair.a(slice(None)).clone()
    lost[7] = math.inf
    lossy = pair._replace(a=lost.__getitem__)
    whole = measure_product(lambda _: pair, exact_product(a, b))
    found = measure_product(lambda _: lossy, exact_product(a, b))
    assert (whole.nonfinite, whole.lost) == (80, 0)
    assert (found.nonfinite, found.lost) == (80, 80)
    rest = [row for row in range(96) if row not in (5, 7)]
    direct = _direct(a[rest], b, lossy._replace(a=lost[rest].__getitem__))
    assert found.sqnr_db == pytest.approx(direct["sqnr_db"], abs=1e-4)


def test_what_a_recipe_does_to_the_product_is_done_to_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_product_module, "_BLOCK_VALUES", 1000)
    a, b = _operands()
    mask = torch.rand(96, 80, generator=torch.Generator().manual_seed(1)) > 0.1
    pair = _pair(a, b)._replace(after=lambda rows, values: values * mask[rows])
    found = measure_product(lambda _: pair, exact_product(a, b))
    exact = a.double() @ b.double()
    d = (pair.a(slice(None)).double() @ pair.b.double()) * mask - exact
    assert found.sqnr_db == pytest.approx(
        float(10 * (exact.square().sum() / d.square().sum()).log10()), abs=1e-4
    )


def test_sums_merge_in_any_order() -> None:
    a, b = _operands()
    parts = [
        measure_product(
            lambda _, some=some: _pair(a[some], b),
            exact_product(a[some], b),
            call=str(some.start),
            blame=True,
        )
        for some in (slice(0, 32), slice(32, 64), slice(64, 96))
    ]
    forwards, backwards = ProductSums(), ProductSums()
    for one in parts:
        forwards.add(one)
    for one in reversed(parts):
        backwards.add(one)
    assert forwards == backwards
    whole = measure_product(lambda _: _pair(a, b), exact_product(a, b))
    assert forwards.calls == 3
    assert forwards.sqnr_db == pytest.approx(whole.sqnr_db, abs=1e-5)


def test_what_is_lost_has_no_part_in_the_blame() -> None:
    a, b = _operands()
    pair = _pair(a, b)
    lost = pair.b.clone()
    lost[:, 7] = math.nan
    found = measure_product(lambda _: pair._replace(b=lost), exact_product(a, b), blame=True)
    rest = [column for column in range(80) if column != 7]
    assert pair.plain_b is not None
    some = pair._replace(b=pair.b[:, rest], plain_b=pair.plain_b[:, rest])
    expected = measure_product(lambda _: some, exact_product(a, b[:, rest]), blame=True)
    assert (found.lost, expected.lost) == (96, 0)
    assert found.blame is not None
    assert expected.blame is not None
    for name, shares in found.blame.shares().items():
        assert shares == {key: pytest.approx(each) for key, each in expected.blame.shares()[name].items()}
