"""Operands made by blocks of rows: the same bits as of the whole operand, however the blocks are cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from capd.formats import qdq
from capd.replay import operand_rows
from capd.replay.operand_rows import PlainRows, QuantisedRows
from capd_client.emulation.quantise import transform_word, word_of_operand
from capd_client.formats.transforms.hadamard import hadamard
from capd_client.recipes.linear_recipe import Operand, Transform

SEED = 7
FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("nvfp4", {}), ("nvfp4", {"block": (16, 16)}), ("nvfp4", {"rounding": "stochastic"}),
    ("nvfp4", {"rounding": "eden"}), ("nvfp4", {"four_over_six": "mse"}), ("nvfp4", {"outer": 128}),
    ("fp8", {}), ("fp8", {"block": (24, 7)}), ("mxfp4", {"shrink": 0.75, "rounding": "stochastic"}),
    ("mxfp4", {"scale_mode": "std"}), ("hif4", {}), ("hifp8", {}), ("hifp8", {"rounding": "stochastic"}),
    ("bf16", {}),
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operand_rows, "_SLAB_VALUES", 1 << 10)


def _values(*, is_finite: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    found = torch.randn(100, 256, generator=generator) * torch.randn(100, 1, generator=generator).exp()
    if not is_finite:
        found[3, 5], found[40, 7], found[99, 200] = torch.nan, torch.inf, -torch.inf
    return found.to(torch.bfloat16)


def _cut(rows: int, step: int) -> Iterator[slice]:
    return (slice(first, min(rows, first + step)) for first in range(0, rows, step))


@pytest.mark.parametrize("keeps", [0, 1 << 22])
@pytest.mark.parametrize("turn", ["", "te", "plain"])
@pytest.mark.parametrize(("fmt", "options"), FORMATS)
def test_rows_are_those_of_the_whole_operand(
    fmt: str, options: dict[str, Any], turn: str, keeps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operand_rows, "_KEPT_VALUES", keeps)
    x = _values(is_finite=not turn)
    transform = {"": None, "te": Transform(16, "te", "bf16"), "plain": Transform(64)}[turn]
    whole = x
    if transform is not None:
        rounded = torch.bfloat16 if transform.round_to else None
        own = x if transform.round_to else x.float()
        whole = hadamard(own, transform.size, signs="te" if turn == "te" else None, round_to=rounded)
    generator = (
        torch.Generator().manual_seed(SEED) if options.get("rounding") in ("stochastic", "eden") else None
    )
    expected = qdq(whole.float(), fmt, generator=generator, **options)
    word = word_of_operand(Operand(fmt, tuple(options.items())))
    for raw in (x, x.t().contiguous().t(), x.float()):
        if raw.dtype == torch.float32 and turn == "te":
            # The transform of float32 is computed in float32 and rounded after.
            continue
        for step in (100, 48, 17):
            plain = PlainRows(raw, transform_word(transform), 0)
            rows = QuantisedRows(plain, word, SEED)
            found = torch.cat([rows(some) for some in _cut(100, step)])
            assert torch.equal(found.nan_to_num(9e9), expected.nan_to_num(9e9)), (step, raw.stride())
            assert found.dtype == torch.float32


def test_both_operands_have_the_signs_of_a_seed() -> None:
    a, b = _values().float(), _values().float().flip(0)
    word = transform_word(Transform(128, "seeded"))
    one, other, third = (PlainRows(each, word, seed).whole() for each, seed in ((a, 3), (b, 3), (b, 4)))
    product = a.double() @ b.double().t()
    assert torch.allclose(one.double() @ other.double().t(), product, atol=1e-3)
    assert not torch.allclose(one.double() @ third.double().t(), product, atol=1e-3)


def test_a_transform_of_the_other_axis_comes_first() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
    found = PlainRows(x, transform_word(Transform(32)), 0, before=transform_word(Transform(16))).whole()
    assert torch.allclose(found, hadamard(hadamard(x, 16, axis=0), 32), atol=1e-5)
