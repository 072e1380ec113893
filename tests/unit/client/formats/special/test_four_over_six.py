"""NVFP4 with four over six, against TransformerEngine's own reference."""

from __future__ import annotations

import pytest
import torch

from capd_client.formats import FormatError, decode, encode, qdq
from tests.kit.formats.references import bf16_reference, nibbles, reference


@pytest.mark.parametrize("tensor", ["plain", "rht"])
@pytest.mark.parametrize("pick", [None, "mae", "mse"])
@pytest.mark.parametrize(("name", "block"), [("rows", 16), ("tiles", (16, 16))])
def test_codes_and_scales_equal_those_of_transformer_engine(
    name: str, block: int | tuple[int, int], pick: str | None, tensor: str
) -> None:
    x = bf16_reference("nvfp4_input" if tensor == "plain" else "transformed")

    found = encode(x, "nvfp4", block=block, four_over_six=pick)

    key = f"{name}_{pick or 'none'}_{tensor}"
    assert torch.equal(found.payload, nibbles(reference(f"{key}_codes")))
    assert torch.equal(found.scale, reference(f"{key}_scales"))
    assert torch.equal(qdq(x.float(), "nvfp4", block=block, four_over_six=pick), decode(found))


def test_a_block_takes_the_scale_with_the_smaller_error() -> None:
    # Under 6 the three 5s would round to 4 or 6; under 4 all values are on the grid.
    x = torch.tensor([[1536.0] + [1280.0] * 3 + [0.0] * 12, [4.0, 3.0, 1.0] + [0.0] * 13])

    six, four = qdq(x, "nvfp4"), qdq(x, "nvfp4", four_over_six="mae")

    assert (four - x).abs().sum() < (six - x).abs().sum()


def test_an_infinity_makes_its_block_nan_and_no_other() -> None:
    x = torch.ones(2, 32)
    x[0, 3] = torch.inf

    found = qdq(x, "nvfp4", four_over_six="mse")

    assert found[0, :16].isnan().all()
    assert torch.equal(found[0, 16:], torch.ones(16))


def test_what_cannot_be_together_is_refused() -> None:
    x = torch.ones(16)
    for options in (
        {"rounding": "stochastic"},
        {"tensor_scale": False},
        {"outer": 128},
        {"rounding": "eden"},
    ):
        with pytest.raises(FormatError, match=r"four_over_six|together"):
            qdq(x, "nvfp4", four_over_six="mae", **options)
    with pytest.raises(FormatError, match="mae, mse"):
        qdq(x, "nvfp4", four_over_six="max")
    with pytest.raises(FormatError, match="mxfp4 takes no four_over_six"):
        qdq(x, "mxfp4", four_over_six="mae")
