"""Any shape, axis, stride and dtype: what a caller sees is the tensor's own shape, and x stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import capd.formats
from capd.formats import FORMATS, decode, encode, qdq
from tests.kit.formats.oracle import same_bits

BLOCKED: list[tuple[str, Any]] = [
    ("fp8", 128), ("fp8", (128, 128)), ("mxfp8", 32), ("mxfp6", 32), ("mxfp4", 32), ("mxfp4", (32, 32)),
    ("mxfp8", 5), ("nvfp4", 16), ("nvfp4", (16, 16)),
]  # fmt: skip
SHAPES = [(), (0,), (1,), (33,), (3, 0), (0, 5), (4, 32), (17, 70), (2, 3, 45), (2, 0, 16), (3, 2, 20, 33)]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_comes_back(fmt: str, shape: tuple[int, ...]) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        kept = values.clone()

        found, encoded = qdq(values, fmt), encode(values, fmt)

        assert found.shape == encoded.payload.shape == values.shape
        assert found.dtype == dtype
        assert decode(encoded).dtype == torch.float32
        assert same_bits(decode(encoded).to(dtype).float(), found.float())
        assert torch.equal(values, kept)


@pytest.mark.parametrize(("fmt", "block"), BLOCKED)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_lie_along_any_axis(fmt: str, block: Any, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    for axis in range(-max(1, min(2, len(shape)) if isinstance(block, tuple) else len(shape)), 0):
        there = values.movedim(axis, -1) if isinstance(block, int) and values.ndim else values
        there = values.transpose(-1, -2) if isinstance(block, tuple) and axis == -2 else there
        expected = encode(there.contiguous(), fmt, block=block)

        found = encode(values, fmt, block=block, axis=axis)

        values_back = decode(found)
        assert found.payload.is_contiguous()
        assert found.scale is not None
        assert expected.scale is not None
        assert same_bits(qdq(values, fmt, block=block, axis=axis), values_back)
        if len(shape) >= 2:
            turn = (lambda t: t.transpose(-1, -2)) if isinstance(block, tuple) and axis == -2 else None
            back = turn or (lambda t, axis=axis: t.movedim(-1, axis) if isinstance(block, int) else t)
            assert torch.equal(found.payload, back(expected.payload))
            assert torch.equal(found.scale, back(expected.scale))
            positive = axis + len(shape)
            assert same_bits(qdq(values, fmt, block=block, axis=positive), values_back)


@pytest.mark.parametrize(("fmt", "block", "scales"), [
    ("mxfp8", 32, (2, 3)), ("nvfp4", 16, (2, 5)), ("nvfp4", (16, 16), (1, 5)), ("fp8", 128, (2, 1)), ("fp8", None, ()),
])  # fmt: skip
def test_there_is_a_scale_per_begun_block(fmt: str, block: Any, scales: tuple[int, ...]) -> None:
    found = encode(torch.randn(2, 70), fmt, block=block)

    assert found.scale is not None
    assert tuple(found.scale.shape) == scales


@pytest.mark.parametrize(("fmt", "block"), BLOCKED)
def test_a_length_that_is_no_multiple_is_as_if_filled_with_zeros(fmt: str, block: Any) -> None:
    values = torch.randn(20, 70, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    filled = torch.zeros(256, 640, dtype=torch.bfloat16)
    filled[:20, :70] = values

    assert same_bits(qdq(values, fmt, block=block).float(), qdq(filled, fmt, block=block)[:20, :70].float())


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("whole", [10**12, (10**9, 10**9)], ids=["row", "tile"])
def test_a_block_that_reaches_beyond_the_tensor_takes_no_more_memory_than_it(fmt: str, whole: Any) -> None:
    values = torch.randn(20, 70, generator=torch.Generator().manual_seed(3))
    least: Any = (20, 70) if isinstance(whole, tuple) else 70
    found, expected = (encode(values, fmt, block=block) for block in (whole, least))

    assert torch.equal(found.payload, expected.payload)
    assert found.scale is not None
    assert expected.scale is not None
    assert torch.equal(found.scale, expected.scale)
    assert same_bits(qdq(values, fmt, block=whole), decode(found))


@pytest.mark.parametrize("fmt", FORMATS)
def test_strides_do_not_matter_and_no_graph_is_built(fmt: str) -> None:
    base = torch.randn(64, 96, generator=torch.Generator().manual_seed(4))
    for view in (base.t(), base[::3, 5::2], base.expand(2, 64, 96), base[:, :1]):
        expected = qdq(view.contiguous(), fmt)
        wanting = view.detach().requires_grad_()

        assert same_bits(qdq(view, fmt), expected)
        assert not qdq(wanting, fmt).requires_grad
        assert not decode(encode(wanting * 1, fmt)).requires_grad


@pytest.mark.parametrize(("fmt", "block"), [("fp8", 128), ("mxfp8", 32), ("nvfp4", 16)])
def test_a_view_whose_rows_are_one_block_each_is_encoded(fmt: str, block: int) -> None:
    base = torch.randn(block, 96, generator=torch.Generator().manual_seed(8))

    found, expected = encode(base, fmt, axis=-2, block=block), encode(base.t().contiguous(), fmt, block=block)

    assert torch.equal(found.payload, expected.payload.t())
    assert same_bits(decode(found), decode(expected).t())


@pytest.mark.parametrize("fmt", FORMATS)
def test_pieces_do_not_show(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(40, 96, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    whole, encoded = qdq(values, fmt), encode(values, fmt)
    monkeypatch.setattr("capd_client.formats.blocks.PIECE_VALUES", 100)

    assert same_bits(qdq(values, fmt).float(), whole.float())
    again = encode(values, fmt)
    assert torch.equal(again.payload.view(torch.uint8), encoded.payload.view(torch.uint8))
    assert again.scale is None or torch.equal(again.scale, encoded.scale)
    assert same_bits(decode(again), decode(encoded))


@given(
    st.sampled_from(FORMATS),
    st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), max_size=80),
)
def test_16_bit_input_is_as_its_float32(fmt: str, numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float16)

    found = qdq(values.float(), fmt)

    assert same_bits(qdq(values, fmt).float(), found.to(torch.float16).float())


@pytest.fixture
def bf16_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_jobs_default_dtype_does_not_matter(fmt: str, bf16_by_default: None) -> None:
    values = torch.randn(9, 40, dtype=torch.float32, generator=torch.Generator().manual_seed(6))
    found = (
        qdq(values, fmt),
        qdq(values, fmt, rounding="stochastic", generator=torch.Generator().manual_seed(7)),
    )
    torch.set_default_dtype(torch.float32)

    assert same_bits(found[0], qdq(values, fmt))
    assert same_bits(
        found[1], qdq(values, fmt, rounding="stochastic", generator=torch.Generator().manual_seed(7))
    )


def test_the_daemons_side_hands_the_same_names_on() -> None:
    import capd_client.formats

    assert capd.formats.__all__ == capd_client.formats.__all__
    assert all(
        getattr(capd.formats, name) is getattr(capd_client.formats, name) for name in capd.formats.__all__
    )
