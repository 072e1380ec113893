"""Rows that a rank computes: against numpy in float64 and against the daemon's own, for every way of computing."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from capd.store.format.dtypes import stored_type
from capd.store.format.frames import StatsRow
from capd.store.format.statistics import merge, summarise
from capd_client.devstats import ROW_DTYPES, fill_row, fill_rows, warm
from capd_client.devstats.codes import fill_from_codes
from capd_client.devstats.formulas import fill_from_values
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.statistics_row import BINS, NO_ROW_DTYPES, ROW_VALUES
from tests.kit.client.statistics_rows import (
    RNG,
    SUMS,
    Bits,
    any_bits,
    assert_row,
    daemon_row,
    ordinary,
    reference,
    tensor_of,
)
from tests.kit.tiers import rows

Fill = Callable[[torch.Tensor, torch.Tensor], None]
NAMES = sorted(str(dtype).removeprefix("torch.") for dtype in ROW_DTYPES)


def looking(tensor: torch.Tensor, row: torch.Tensor) -> None:
    fill_from_values(tensor.reshape(-1), row, blind=False)


def blind(tensor: torch.Tensor, row: torch.Tensor) -> None:
    fill_from_values(tensor.reshape(-1), row, blind=True)


def codes(tensor: torch.Tensor, row: torch.Tensor) -> None:
    fill_from_codes(tensor.reshape(-1), row)


WAYS: list[Fill] = [fill_row, looking, blind]
EACH = [(name, way) for name in NAMES for way in (*WAYS, *[codes] * (ITEM_NBYTES[name] <= 2))]


def row_of(fill: Fill, tensor: torch.Tensor) -> NDArray[np.float64]:
    row = torch.full((ROW_VALUES,), 7.5, dtype=torch.float64)  # what was there before must not matter
    fill(tensor, row)
    return row.numpy()


def test_every_kept_dtype_but_64_bit_integers_has_a_row() -> None:
    kept = {name for name in ITEM_NBYTES if hasattr(torch, name)}

    assert set(NAMES) == kept - NO_ROW_DTYPES


@pytest.mark.parametrize(("dtype", "way"), EACH)
@pytest.mark.parametrize("make", [ordinary, any_bits])
def test_a_row_equals_numpy_in_float64_and_the_daemons(
    make: Callable[..., Bits], dtype: str, way: Fill
) -> None:
    bits = make(dtype)

    row = row_of(way, tensor_of(bits, dtype))

    assert_row(row, reference(bits, dtype), bits, dtype)
    assert_row(row, daemon_row(summarise(bits, dtype)), bits, dtype)


def test_many_tensors_have_the_rows_of_each() -> None:
    made = [(name, any_bits(name, count)) for name in NAMES for count in (1, 3001)]
    rows = torch.full((len(made), ROW_VALUES), 7.5, dtype=torch.float64)

    fill_rows([(tensor_of(bits, name), row) for (name, bits), row in zip(made, rows, strict=True)])

    for (name, bits), row in zip(made, rows, strict=True):
        assert_row(row.numpy(), reference(bits, name), bits, name)
    fill_rows([])


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("dtype", "way"), EACH)
def test_deterministic_algorithms_change_no_row_and_refuse_none(dtype: str, way: Fill) -> None:
    bits = any_bits(dtype)
    tensor = tensor_of(bits, dtype)
    usual = row_of(way, tensor)

    with deterministic():
        row = row_of(way, tensor)

    np.testing.assert_array_equal(row, usual)
    assert_row(row, reference(bits, dtype), bits, dtype)


class Names(TorchDispatchMode):
    """Remembers which operations run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


# What torch refuses on a GPU under deterministic algorithms, or computes in a slow way there.
ADDING = {"scatter_add_", "scatter_add", "index_add_", "index_put_", "put_", "histc", "bincount", "cumsum"}


def test_deterministic_rows_of_a_device_add_nothing_by_place() -> None:
    tensor, row = torch.randn(3001), torch.empty(ROW_VALUES, dtype=torch.float64)
    with Names() as usual:
        fill_from_values(tensor, row, blind=True)
    with deterministic(), Names() as ordered:
        fill_from_values(tensor, row, blind=True)

    assert usual.seen & ADDING == {"scatter_add_"}
    assert ordered.seen & ADDING == set()


@pytest.mark.parametrize("rows", [False, True])
def test_warming_runs_the_copies_of_captures_and_looks_at_nothing(rows: bool) -> None:
    with NothingWaits(), Names() as watched:
        warm(torch.device("cpu"), rows=rows)
    assert "copy_" in watched.seen
    assert ("scatter_add_" in watched.seen) is rows


def test_warming_in_inference_mode_and_under_deterministic_algorithms() -> None:
    with torch.inference_mode(), deterministic():
        warm(torch.device("cpu"), rows=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", rows(["float32", "bfloat16", "float8_e5m2", "int16"], ["bfloat16"]))
def test_several_blocks_and_a_rest_make_one_row(dtype: str, way: Fill) -> None:
    bits = ordinary(dtype, 2 * (1 << 20) + 4321)

    assert_row(row_of(way, tensor_of(bits, dtype)), reference(bits, dtype), bits, dtype)


@pytest.mark.parametrize(("dtype", "way"), EACH)
@pytest.mark.parametrize(
    "shape", rows([((),), ((0,),), ((3, 0),), ((1,),), ((2, 3, 5),)], [((),), ((3, 0),), ((2, 3, 5),)])
)
def test_shapes_do_not_matter(shape: tuple[int, ...], dtype: str, way: Fill) -> None:
    bits = ordinary(dtype, max(1, math.prod(shape)))[: math.prod(shape)].reshape(shape)

    assert_row(row_of(way, tensor_of(bits, dtype)), reference(bits, dtype), bits, dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2"])
def test_without_a_finite_element_there_are_no_extremes(dtype: str, way: Fill) -> None:
    tensor = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan]).to(getattr(torch, dtype))

    row = row_of(way, tensor)

    assert row[:4].tolist() == [4, 2, 2, 0]
    assert np.isnan(row[4:7]).all()
    assert row[SUMS].tolist() == [0, 0, 0, 0]
    assert row[BINS][-1] == row[BINS].sum() == 4


@pytest.mark.parametrize("way", WAYS)
def test_squares_beyond_fp16_are_summed(way: Fill) -> None:
    row = row_of(way, torch.full((200_000,), -60_000.0, dtype=torch.float16))

    assert row[SUMS].tolist() == [200_000 * (-60_000.0) ** power for power in (1, 2, 3, 4)]


@pytest.mark.parametrize("way", WAYS)
def test_squares_beyond_float64_are_infinite_as_in_the_daemon(way: Fill) -> None:
    tensor = torch.tensor([1e200, -1e200, 1e-320], dtype=torch.float64)

    row = row_of(way, tensor)

    np.testing.assert_array_equal(row, daemon_row(summarise(tensor.numpy(), "float64")))
    np.testing.assert_array_equal(row[SUMS], [1e-320, math.inf, math.nan, math.inf])


def test_rows_of_parts_with_different_means_merge_to_that_of_the_whole() -> None:
    parts = [torch.full((1000,), 2.5), torch.full((3000,), -10.25), torch.tensor([torch.nan, 0.0, 1e-42])]

    rows = [row_of(fill_row, part) for part in parts]

    merged = merge(merge(stats_of(rows[0]), stats_of(rows[1])), stats_of(rows[2]))
    whole = torch.cat(parts).numpy()
    assert_row(daemon_row(merged), reference(whole, "float32"), whole, "float32")


def stats_of(row: NDArray[np.float64]) -> StatsRow:
    present = np.flatnonzero(row[BINS])
    pairs = np.stack([present, row[BINS.start + present]], axis=-1)
    return StatsRow(
        *row[: BINS.start].tolist(), pairs.ravel().astype(int).tolist(), *row[BINS.stop :].tolist()
    )


def test_the_callers_tensor_and_random_state_stay_as_they_were() -> None:
    for name in NAMES:
        bits = any_bits(name)
        tensor, state = tensor_of(bits, name), torch.get_rng_state()
        for way in (fill_row, looking, blind):
            row_of(way, tensor)
        assert tensor.view(torch.uint8).numpy().tobytes() == bits.tobytes()
        assert torch.equal(torch.get_rng_state(), state)


def test_a_tensor_in_a_graph_of_gradients_and_inference_mode() -> None:
    weights = torch.ones(5, requires_grad=True)
    with torch.inference_mode():
        row = row_of(fill_row, weights)

    assert row[0] == row_of(fill_row, weights * 2)[0] == 5


class NothingWaits(TorchDispatchMode):
    """Refuses what makes the host wait for a device, and remembers the largest tensor made."""

    WAITING = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique", "is_nonzero", "histc")

    largest_nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in self.WAITING, name
        assert not (name.startswith("index") and any(_is_mask(arg) for arg in args)), name
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest_nbytes = max(self.largest_nbytes, result.untyped_storage().nbytes())
        return result


def _is_mask(arg: object) -> bool:
    return isinstance(arg, (list, tuple)) and any(
        isinstance(item, torch.Tensor) and item.dtype is torch.bool for item in arg
    )


@pytest.mark.parametrize("mode", [contextlib.nullcontext, deterministic])
@pytest.mark.parametrize("dtype", NAMES)
def test_on_a_device_nothing_waits_and_memory_is_bounded(
    dtype: str, mode: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    tensor = tensor_of(any_bits(dtype, (1 << 20) + 5), dtype)
    given = tensor.untyped_storage().nbytes()
    row = torch.empty(ROW_VALUES, dtype=torch.float64)

    with mode(), NothingWaits() as watched:
        fill_from_values(tensor, row, blind=True)

    assert watched.largest_nbytes <= max(given, 16 << 20)
    with pytest.raises(AssertionError), NothingWaits():
        bool(row[0])  # the watcher does see a wait


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(0, 2),
    "strided": lambda x: x[:, ::2, 1:],
    "one long row": lambda x: x.reshape(1, -1)[:, 1::2],
    "expanded": lambda x: x[:1, :3].expand(40, 3, x.shape[2]),
    "no rows": lambda x: x[:0, ::2],
    "one element": lambda x: x[0, 0, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool"])
def test_layouts_do_not_matter(dtype: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capd_client.devstats.layouts._PIECE", 500)
    source = LAYOUTS[layout](tensor_of(any_bits(dtype, 9 * 20 * 30), dtype).view(9, 20, 30))
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[source.element_size()]
    bits = source.view(words).numpy().copy().view(stored_type(dtype).stored)

    assert_row(row_of(fill_row, source), reference(bits, dtype), bits, dtype)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::3], torch._neg_view])
def test_a_cast_tensor_counts_as_what_it_is_cast_to(
    make: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capd_client.devstats.layouts._PIECE", 500)
    source = make(torch.from_numpy(RNG.standard_normal((60, 90)) * 1e5))
    row = torch.empty(ROW_VALUES, dtype=torch.float64)

    fill_row(source, row, torch.float16)

    cast = source.to(torch.float16).resolve_neg().contiguous().numpy()
    assert np.isinf(cast).any()
    assert_row(row.numpy(), reference(cast, "float16"), cast, "float16")


@pytest.mark.fault
def test_the_benchmark_of_rank_statistics_runs() -> None:
    script = Path(__file__).parents[4] / "benchmarks" / "rank_statistics.py"
    done = subprocess.run(
        [sys.executable, script, "--rounds", "1", "--sizes", "64"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "float8_e4m3fn" in done.stdout
