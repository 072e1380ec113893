"""Hadamard transforms: against TransformerEngine's reference, and what holds for any of them."""

from __future__ import annotations

import pytest
import torch

from capd_client.formats import FormatError
from capd_client.formats.transforms.hadamard import hadamard, inverse_hadamard, seeded_signs
from tests.kit.formats.references import bf16_reference


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_transform_of_transformer_engine_is_equal_bit_for_bit() -> None:
    assert torch.equal(hadamard(bf16_reference("nvfp4_input"), 16, signs="te"), bf16_reference("transformed"))


@pytest.mark.parametrize("size", [1, 2, 16, 32, 128])
def test_products_stay_the_same_and_the_inverse_undoes_it(size: int) -> None:
    a, b, signs = normal(24, 256), normal(12, 256, seed=1), seeded_signs(size, 4)

    both = [hadamard(x, size, signs=signs) for x in (a, b)]

    exact = a.double() @ b.double().t()
    assert (both[0].double() @ both[1].double().t() - exact).norm() <= 1e-6 * exact.norm()
    torch.testing.assert_close(inverse_hadamard(both[0], size, signs=signs), a, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(both[0].norm(), a.norm(), rtol=1e-6, atol=0)


def test_an_axis_is_the_same_as_that_axis_moved() -> None:
    x = normal(32, 3, 5)

    assert torch.equal(hadamard(x, 32, axis=0), hadamard(x.movedim(0, -1), 32).movedim(-1, 0))


def test_an_outlier_is_spread_over_its_group_alone() -> None:
    x = torch.zeros(2, 32)
    x[0, 5] = 4.0

    found = hadamard(x, 16)

    assert torch.equal(found[0, :16].abs(), torch.ones(16))
    assert not found[0, 16:].any()


def test_seeds_give_signs_and_signs_change_the_result() -> None:
    assert torch.equal(seeded_signs(64, 3), seeded_signs(64, 3))
    assert not torch.equal(seeded_signs(64, 3), seeded_signs(64, 4))
    assert not torch.equal(
        hadamard(normal(1, 64), 64), hadamard(normal(1, 64), 64, signs=seeded_signs(64, 3))
    )


def test_what_cannot_be_transformed_is_refused_in_words() -> None:
    x = torch.ones(4, 48)
    for size, options, says in (
        (3, {}, "1, 2, 4"), (256, {}, "1, 2, 4"), (32, {}, "has 48 values"), (16, {"axis": 7}, "axis 7"),
        (8, {"signs": "te"}, "size 16"), (16, {"signs": "me"}, "allowed are"),
        (2, {"signs": torch.zeros(2)}, "1 or -1"),
    ):  # fmt: skip
        with pytest.raises(FormatError, match=says):
            hadamard(x, size, **options)
    with pytest.raises(FormatError, match="int64"):
        hadamard(torch.ones(16, dtype=torch.int64), 16)
