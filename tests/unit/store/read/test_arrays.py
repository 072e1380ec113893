"""The arrays of a series: their numbers against torch's, their names and coordinates, and when they read."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import capd
from capd.errors import CapdError, DamagedRecord
from capd.store.format.dtypes import stored_type
from capd_client.protocol.dtypes import ITEM_NBYTES
from tests.kit.store.writing import Writer, key
from tests.kit.tiers import rows

xarray = pytest.importorskip("xarray")
RNG = np.random.default_rng(25)
SHAPE = (3, 6)


def any_bits(dtype: str, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    stored = stored_type(dtype).stored
    if dtype == "bool":
        return RNG.integers(0, 2, shape).astype(bool)
    return np.frombuffer(RNG.bytes(int(np.prod(shape)) * stored.itemsize), stored).reshape(shape)


def numbers_of(tensor: object, dtype: str) -> np.ndarray:
    """What torch itself says of a tensor's numbers."""
    import torch

    assert isinstance(tensor, torch.Tensor)
    if dtype == "float4_e2m1fn_x2":
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        codes = tensor.view(torch.uint8).to(torch.int64)
        halves = torch.stack([codes & 15, codes >> 4], -1)
        return grid[halves].flatten(-2).numpy()
    return (tensor.float() if stored_type(dtype).encoding == "bits" else tensor).numpy()


@pytest.mark.parametrize(
    "dtype", rows(sorted(ITEM_NBYTES), ["bfloat16", "float4_e2m1fn_x2", "float8_e4m3fn", "float32", "int64"])
)
def test_the_numbers_of_every_dtype_are_torchs(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    writer = Writer(tmp_path)
    for iteration in range(3):
        writer.put(key(), dtype, any_bits(dtype), iteration=iteration)
    writer.close()
    [series] = capd.open(writer.run)
    expected = np.stack([numbers_of(series.torch(i), dtype) for i in range(3)])

    arrays = {
        "xarray": series.xarray().values,
        "dask": series.dask().compute(scheduler="synchronous"),
        "stack": series.stack(),
        "values": np.stack([record.values() for record in series]),
    }

    for name, found in arrays.items():
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
        # Bit for bit but for the payload of a NaN, which a cast to float32 may change.
        np.testing.assert_array_equal(found, expected, name)
    bits = {series.xarray(bits=True).values.tobytes(), series.stack(bits=True).tobytes()}
    assert bits == {series.dask(bits=True).compute(scheduler="synchronous").tobytes()}
    assert bits == {np.stack([series.numpy(i) for i in range(3)]).tobytes()}


def test_records_have_their_moments_and_the_array_its_key(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    one = key("weight", layer=3, module="layers.3.q_proj", component="linear", layer_type="linear")
    for iteration in range(4):
        writer.put(
            one,
            "bfloat16",
            any_bits("bfloat16"),
            iteration=iteration,
            micro_batch=1,
            time_ns=10**18 + iteration,
        )
    writer.close()
    [series] = capd.open(writer.run)

    array = series.xarray()

    assert array.dims == ("record", "out_feature", "in_feature")
    assert array.iteration.values.tolist() == [0, 1, 2, 3]
    assert array.micro_batch.values.tolist() == [1] * 4
    assert array.time.dtype == np.dtype("datetime64[ns]")
    assert array.time.values.astype("i8").tolist() == [10**18 + i for i in range(4)]
    assert "sample_idx" not in array.coords
    assert array.sel(record=2).iteration == 2
    assert array.swap_dims(record="iteration").sel(iteration=3).values.shape == SHAPE
    assert array.name == "weight"
    assert {"layer": 3, "module": "layers.3.q_proj", "dtype": "bfloat16"}.items() <= array.attrs.items()
    assert xarray.Dataset({"weight": array}).weight.mean().dtype == np.float32


@pytest.mark.parametrize(
    ("fields", "attributes", "shape", "names"),
    [
        ({"tensor_name": "query"}, {"layout": "bhsd"}, (1, 2, 3, 4), ("batch", "head", "sequence", "size")),
        ({"tensor_name": "query"}, {"layout": "thd"}, (2, 3, 4), ("token", "head", "size")),
        ({"tensor_name": "query"}, {"layout": "bhsd"}, (2, 3), ("dim_0", "dim_1")),
        (
            {"tensor_name": "output"},
            {"layout": "bhsd", "output_layout": "bshd"},
            (1, 2, 3, 4),
            ("batch", "sequence", "head", "size"),
        ),
        ({"tensor_name": "input", "component": "linear"}, {}, (2, 3, 4), ("dim_0", "dim_1", "in_feature")),
        (
            {"tensor_name": "input", "component": "linear", "operation": "backward"},
            {},
            (3, 4),
            ("dim_0", "out_feature"),
        ),
        ({"tensor_name": "output", "component": "linear"}, {}, (3, 4), ("dim_0", "out_feature")),
        (
            {"tensor_name": "weight", "component": "linear"},
            {"weight_layout": "in_out"},
            (3, 4),
            ("in_feature", "out_feature"),
        ),
        (
            {"tensor_name": "weight", "component": "linear"},
            {"weight_layout": "expert,in,out"},
            (2, 3, 4),
            ("expert", "in_feature", "out_feature"),
        ),
        ({"tensor_name": "weight", "component": "linear"}, {}, (3,), ("dim_0",)),
        ({"tensor_name": "query"}, {"layout": "ss"}, (2, 3), ("dim_0", "dim_1")),
        ({"tensor_name": "loss"}, {}, (), ()),
    ],
)
def test_axes_are_named_where_their_meaning_is_known(
    fields: dict[str, object], attributes: dict[str, object], shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    from capd.store.arrays.labelled import dimension_names

    assert dimension_names(key(**fields), attributes, len(shape)) == names


def test_ragged_records_end_in_nan_and_scalars_have_one_axis(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    held = [any_bits("float32", shape) for shape in ((4, 3), (2, 1))]
    for iteration, bits in enumerate(held):
        writer.put(key("ragged"), "float32", bits, iteration=iteration)
        writer.put(key("whole"), "int32", bits.view("i4"), iteration=iteration)
        writer.put(key("scalar"), "bfloat16", np.array(0x3F80 + iteration, "u2"), iteration=iteration)
    writer.close()
    store = capd.open(writer.run)

    [ragged], [whole], [scalar] = (store.find(tensor_name=name) for name in ("ragged", "whole", "scalar"))
    array = ragged.xarray().values
    assert array.shape == (2, 4, 3)
    for found, bits in zip(array, held, strict=True):
        assert found[: bits.shape[0], : bits.shape[1]].tobytes() == bits.tobytes()
        assert np.isnan(found[bits.shape[0] :]).all()
        assert np.isnan(found[:, bits.shape[1] :]).all()
    assert (whole.xarray().values[1, 2:] == 0).all()
    assert scalar.xarray().values.tolist() == [1.0, 1.0078125]
    assert scalar.dask().compute(scheduler="synchronous").tolist() == [1.0, 1.0078125]


def test_any_index_reads_what_the_whole_array_has_there(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for iteration in range(5):
        writer.put(
            key("packed"), "float4_e2m1fn_x2", any_bits("float4_e2m1fn_x2", (4, 7)), iteration=iteration
        )
        writer.put(key("plain"), "bfloat16", any_bits("bfloat16", (4, 14)), iteration=iteration)
    writer.close()
    for name in ("packed", "plain"):
        [series] = capd.open(writer.run).find(tensor_name=name)
        whole = series.stack()
        assert whole.shape == (5, 4, 14)
        for index in (
            (1,), (slice(1, 4), 2), (slice(None), slice(None), slice(3, 9)), (..., 5), (..., slice(1, 12, 3)),
            (slice(0, 5, 2), 3, slice(13, 14)), (slice(2, 2),), (-1, -1, -1),
        ):  # fmt: skip
            np.testing.assert_array_equal(series.lazy()[index], whole[index], f"{name} {index}")
            np.testing.assert_array_equal(series.dask()[index].compute(scheduler="synchronous"), whole[index])
        lazy = series.xarray()
        np.testing.assert_array_equal(lazy[[4, 0, 2], :, ::-1].values, whole[[4, 0, 2], :, ::-1])
        np.testing.assert_array_equal(lazy.isel(record=[1, 3]).values, whole[[1, 3]])


def test_nothing_is_read_before_it_is_used_and_damage_is_an_error(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for iteration in range(3):
        writer.put(key(), "float32", any_bits("float32", (64, 1024)), iteration=iteration)
    writer.close()
    [series] = capd.open(writer.run)
    [shard] = (path for path in (writer.run / series.path / "data" / "c").rglob("*") if path.is_file())
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1  # in the second record
    shard.write_bytes(content)

    array, blocks = series.xarray(), series.dask()

    assert array[0].values.tobytes() == series.numpy(0).tobytes()
    assert array.isel(record=2).values.tobytes() == series.numpy(2).tobytes()
    for read in (lambda: array[1].values, lambda: blocks[1].compute(scheduler="synchronous")):
        with pytest.raises(DamagedRecord, match="#1"):
            read()


def test_arrays_hold_the_records_of_the_view(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for attempt in range(2):
        writer.put(key(), "int64", np.array([attempt]), iteration=0, attempt=attempt)
    writer.put(key("live"), "int64", np.array([7]))
    writer.flush()
    store = capd.open(writer.run)  # nothing is sealed yet

    [latest], [everything] = (store.find(tensor_name="input", attempt=which) for which in ("latest", "all"))

    assert latest.xarray().values.tolist() == [[1]]
    assert latest.xarray().record.values.tolist() == [1]
    assert everything.xarray().attempt.values.tolist() == [0, 1]
    # As workers of dask, joblib and torch get them.
    assert pickle.loads(pickle.dumps(latest.xarray())).values.tolist() == [[1]]  # noqa: S301 - written above
    assert store.find(tensor_name="live")[0].dask().compute(scheduler="synchronous").tolist() == [[7]]
    writer.close()


def test_statistics_alone_have_no_array(tmp_path: Path) -> None:
    from capd.store.format.dtypes import statistics_of
    from capd_client.protocol.statistics_row import ROW_VALUES

    writer = Writer(tmp_path)
    writer.put(key(), statistics_of("float32"), np.zeros(ROW_VALUES))
    writer.close()
    [series] = capd.open(writer.run)

    for read in (series.xarray, series.dask, series.stack, series.lazy):
        with pytest.raises(CapdError, match="only statistics were kept"):
            read()
