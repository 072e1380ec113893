"""What the store owes to torch: tensors of the captured dtype, and the values that torch gives to their bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import capd
from capd.errors import CapdError
from capd.store.format.dtypes import stored_type, to_values
from capd_client.protocol.dtypes import ITEM_NBYTES
from tests.kit.store.writing import Writer, key

torch = pytest.importorskip("torch", reason="Series.torch is all that needs torch in capd.store")
RNG = np.random.default_rng(7)


def any_bits(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Any bit pattern of the stored dtype (0 and 1 for bool)."""
    stored = stored_type(dtype).stored
    if dtype == "bool":
        return RNG.integers(0, 2, shape).astype(bool)
    return np.frombuffer(RNG.bytes(int(np.prod(shape)) * stored.itemsize), stored).reshape(shape)


def test_torch_returns_the_captured_dtype(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for dtype in ITEM_NBYTES:
        writer.put(key(dtype), dtype, any_bits(dtype, (4, 6)))
    writer.close()

    for series in capd.open(writer.run).series:
        tensor = series.torch(0)
        assert tensor.dtype == getattr(torch, series.dtype)
        assert (
            tensor.view(torch.uint8).numpy().tobytes()
            == writer.held[(series.key, series.dtype)][0][1].tobytes()
        )


def test_a_region_becomes_a_tensor_with_memory_of_its_own(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    held = any_bits("bfloat16", (40, 3000))
    writer.put(key(), "bfloat16", held)
    writer.close()
    [series] = capd.open(writer.run).series
    part = (slice(0, 3), slice(None, 5))

    tensor = series.torch(0, part)

    assert tensor.dtype == torch.bfloat16
    assert tensor.view(torch.uint16).numpy().tobytes() == held[part].tobytes()
    tensor.zero_()
    assert series.numpy(0).tobytes() == held.tobytes()
    assert series.torch(0, (slice(3, 3),)).shape == (0, 3000)


def test_a_record_without_elements_becomes_an_empty_tensor(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.put(key("experts"), "float32", np.zeros((4, 8), "f4"), iteration=0)
    writer.put(key("experts"), "float32", np.zeros((0, 3), "f4"), iteration=1)
    writer.close()
    [series] = capd.open(writer.run).series

    assert series.torch(1).shape == (0, 3)


@pytest.mark.parametrize("dtype", [name for name in ITEM_NBYTES if name.startswith(("bfloat", "float8"))])
def test_bits_have_the_values_that_torch_gives_them(dtype: str) -> None:
    patterns = np.arange(256 if dtype.startswith("float8") else 65_536).astype(stored_type(dtype).stored)

    expected = torch.from_numpy(patterns).view(getattr(torch, dtype)).to(torch.float64).numpy()

    assert np.array_equal(to_values(patterns, dtype).astype(np.float64), expected, equal_nan=True)


def test_elements_that_were_not_kept_make_no_tensor(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.put_statistics(key(), "bfloat16", np.ones((2, 3), "u2"))
    writer.close()

    [series] = capd.open(writer.run).find(tensor_name="input")
    with pytest.raises(CapdError, match="only statistics were kept"):
        series.torch(0)
