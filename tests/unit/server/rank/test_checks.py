"""Descriptors are checked field by field before a byte of the arena is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from capd.server.rank.checks import believes_row, define_problem, descriptor_problem
from capd.store.documents.json_document import MAX_DEPTH
from capd.store.format.dtypes import stored_type
from capd.store.format.frames import StatsRow
from capd.store.format.packed_statistics import pack, unpack
from capd.store.format.statistics import summarise
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define, Descriptor, Part
from capd_client.protocol.statistics_row import NO_ROW_DTYPES, ROW_NBYTES, ROW_VALUES

ARENA = 1 << 20
KEY = Key(quant_type="bf16", rank=0, tensor_name="x")
BF16 = Define(id=0, key=KEY, dtype="bfloat16")


def descriptor(
    offset: int = 4096, nbytes: int = 12, shape: tuple[int, ...] = (2, 3), metadata: bytes = b""
) -> Descriptor:
    return Descriptor(1, offset, nbytes, 0, shape, Moment(), metadata=metadata)


@pytest.mark.parametrize("dtype", sorted(ITEM_NBYTES))
def test_every_dtype_is_accepted_with_its_size(dtype: str) -> None:
    define = Define(id=0, key=KEY, dtype=dtype)
    nbytes = 6 * ITEM_NBYTES[dtype]

    assert descriptor_problem(descriptor(nbytes=nbytes), define, ARENA) is None
    assert descriptor_problem(descriptor(nbytes=nbytes + 1), define, ARENA) is not None


@pytest.mark.parametrize(
    "good",
    [
        descriptor(offset=ARENA - 12),
        descriptor(nbytes=2, shape=()),
        descriptor(offset=0, nbytes=0, shape=(0, 7)),
        descriptor(metadata=b'{"loss": 1.5, "nested": {"a": [1]}}'),
        descriptor(metadata=b'{"a":[' + b"[]," * 100 + b"[]]}"),
    ],
    ids=["at the very end", "0-d", "empty", "metadata", "many lists"],
)
def test_sound_descriptors_pass(good: Descriptor) -> None:
    assert descriptor_problem(good, BF16, ARENA) is None


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (descriptor(offset=4095), "counter page"),
        (descriptor(offset=0), "counter page"),
        (descriptor(offset=ARENA - 11), "end"),
        (descriptor(offset=2**63 - 1), "end"),
        (descriptor(shape=(2, 4)), "bytes"),
        (descriptor(shape=(2**62, 2**62)), "bytes"),
        (descriptor(nbytes=0, shape=(2, 3)), "bytes"),
        (descriptor(nbytes=0, shape=(0, 2**31, 2**31)), "larger than any arena"),
        (descriptor(nbytes=0, shape=(2**43, 2, 0)), "larger than any arena"),
        (descriptor(metadata=b"[1]"), "metadata"),
        (descriptor(metadata=b'{"a":"\xff"}'), "metadata"),
        (descriptor(metadata=b"{"), "metadata"),
        (descriptor(metadata=b'{"a":' * 500 + b"1" + b"}" * 500), "metadata"),
        (descriptor(metadata=b'{"a":' + b"[" * 65 + b"]" * 65 + b"}"), "metadata"),
    ],
)
def test_contradicting_descriptors_are_named(bad: Descriptor, says: str) -> None:
    problem = descriptor_problem(bad, BF16, ARENA)

    assert problem is not None
    assert says in problem


def ordered(*order: int, **fields: Any) -> Descriptor:
    return Descriptor(1, 4096, 12, 0, (2, 3), Moment(), order=order, **fields)


def test_an_order_of_axes_names_each_of_them_once() -> None:
    for good in (ordered(1, 0), ordered(0, 1), ordered(1, 0, payload=False)):
        assert descriptor_problem(good, BF16, ARENA) is None
    for bad in (ordered(), ordered(0), ordered(0, 0), ordered(0, 2), ordered(0, 1, 2)):
        assert "order" in str(descriptor_problem(bad, BF16, ARENA))
    assert "part" in str(descriptor_problem(ordered(1, 0, part=Part(0, 0, 12)), BF16, ARENA))


def part(nbytes: int = 6, first: int = 4, total: int = 12, record: int = 0) -> Descriptor:
    return Descriptor(1, 4096, nbytes, 0, (2, 3), Moment(), part=Part(record, first, total))


@pytest.mark.parametrize("good", [part(), part(12, 0), part(first=6), part(nbytes=0, first=12)])
def test_sound_parts_pass(good: Descriptor) -> None:
    assert descriptor_problem(good, BF16, ARENA) is None


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (part(total=14), "bytes"),
        (part(first=7), "no part"),
        (part(first=2**63 - 1), "no part"),
        (part(record=1), "before its part"),
        (Descriptor(1, 4096, 6, 0, (2, 3), Moment(), row_offset=4096, part=Part(0, 0, 12)), "statistics row"),
        (Descriptor(1, 4096, 0, 0, (0, 3), Moment(), part=Part(0, 0, 0)), "no part"),
        (Descriptor(1, ARENA - 4, 6, 0, (2, 3), Moment(), part=Part(0, 4, 12)), "end"),
        (Descriptor(1, 0, 6, 0, (2, 3), Moment(), part=Part(0, 4, 12)), "counter page"),
        (Descriptor(1, 4096, 6, 0, (2**45,), Moment(), part=Part(0, 0, 2**46)), "larger than any arena"),
    ],
)
def test_contradicting_parts_are_named(bad: Descriptor, says: str) -> None:
    assert says in str(descriptor_problem(bad, BF16, ARENA))


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [(b"raw", "JSON"), (float("nan"), "JSON"), ([{"a": float("inf")}], "JSON"), (nested(64), "nested")],
    ids=["bytes", "nan", "infinity inside", "deep"],
)
def test_attributes_that_cannot_be_kept_are_named(value: object, says: str) -> None:
    problem = define_problem(Define(id=3, key=KEY, dtype="bfloat16", attributes={"a": value}))

    assert problem is not None
    assert says in problem
    assert "key id 3" in problem


def test_sound_attributes_pass() -> None:
    attributes = {"layout": [1, None, "x"], "deep": nested(MAX_DEPTH - 1), "scale": 0.5}
    assert define_problem(Define(id=0, key=KEY, dtype="bfloat16", attributes=attributes)) is None


def test_undefined_keys_and_unknown_dtypes_are_named() -> None:
    assert "never defined" in str(descriptor_problem(descriptor(), None, ARENA))
    assert "complex64" in str(
        descriptor_problem(descriptor(), Define(id=0, key=KEY, dtype="complex64"), ARENA)
    )


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ({"row_offset": 8192}, None),
        ({"row_offset": ARENA - ROW_NBYTES}, None),
        ({"row_offset": 8192, "payload": False, "nbytes": 0}, None),
        ({"row_offset": 8192, "payload": False, "nbytes": 0, "offset": 0}, None),
        ({"payload": False}, None),
        ({"row_offset": 8193}, "no multiple of 8"),
        ({"row_offset": 4088}, "counter page"),
        ({"row_offset": 0}, "counter page"),
        ({"row_offset": ARENA - ROW_NBYTES + 8}, "end"),
        ({"row_offset": 2**63 - 8}, "end"),
        ({"row_offset": 8192, "payload": False}, "0 bytes, not 12"),
        ({"payload": False, "nbytes": 0}, "12 bytes, not 0"),
        ({"payload": False, "offset": 0}, "counter page"),
        (
            {"row_offset": 8192, "payload": False, "nbytes": 0, "shape": (2**62, 2**62)},
            "larger than any arena",
        ),
    ],
)
def test_places_of_rows_and_bytes_must_fit_together(item: dict[str, object], says: str | None) -> None:
    fields: dict[str, object] = {"offset": 4096, "nbytes": 12, "shape": (2, 3), **item}
    problem = descriptor_problem(Descriptor(sequence=1, key_id=0, moment=Moment(), **fields), BF16, ARENA)  # type: ignore[arg-type]

    assert problem is None if says is None else says in str(problem)


@pytest.mark.parametrize("dtype", sorted(set(ITEM_NBYTES) - NO_ROW_DTYPES))
@pytest.mark.parametrize("shape", [(), (0, 4), (7, 9)], ids=str)
def test_rows_of_real_tensors_are_believed(dtype: str, shape: tuple[int, ...]) -> None:
    stored = stored_type(dtype).stored
    random = np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 256, 63 * stored.itemsize, "u1")
    bits = random.view(stored)[: int(np.prod(shape))].reshape(shape)
    stats = summarise(bits, dtype)

    assert believes_row(pack(stats), dtype, shape)
    # The cubes of float64 may be Inf of both signs, and their sum NaN.
    assert pack(unpack(np.frombuffer(pack(stats)), dtype)) == pack(stats)


def test_a_row_without_finite_elements_is_believed() -> None:
    bits = np.array([0x7F80, 0xFF80, 0x7FC0], "u2")  # infinities and a NaN as bfloat16
    stats = summarise(bits, "bfloat16")

    assert stats.min is None
    assert believes_row(pack(stats), "bfloat16", (3,))
    assert unpack(np.frombuffer(pack(stats)), "bfloat16") == stats


GOOD = StatsRow(6, 1, 1, 1, -2.0, 3.0, 3.0, 1.5, 13.25, [0, 1, 126, 1, 128, 2, 255, 2])


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, 5.0), (0, np.inf), (0, np.nan), (1, -1.0), (1, 0.5), (1, 2.0), (2, 0.0), (3, 5.0), (3, np.nan),
        (4, 4.0), (4, np.nan), (4, -np.inf), (5, np.inf), (5, -3.0), (6, 2.0), (6, np.nan), (8, -1.0),
        (8, np.nan), (9, 0.0), (9, -1.0), (9, 1e300), (9 + 126, 0.5), (9 + 255, 3.0), (9 + 254, 1.0),
    ],
)  # fmt: skip
def test_rows_that_contradict_the_tensor_or_themselves_are_not(at: int, value: float) -> None:
    row = np.frombuffer(pack(GOOD)).copy()
    assert believes_row(row.tobytes(), "float32", (2, 3))
    row[at] = value

    assert not believes_row(row.tobytes(), "float32", (2, 3))


def test_rows_of_another_tensor_or_dtype_are_not_believed() -> None:
    row = pack(GOOD)
    fraction = pack(StatsRow(6, 0, 0, 1, -2.5, 3.0, 3.0, 1.5, 13.25, [0, 1, 128, 5]))
    huge = pack(StatsRow(6, 0, 0, 1, -2.0, 1e300, 1e300, 1.5, 13.25, [0, 1, 128, 5]))

    assert not believes_row(row, "float32", (7,))
    assert not believes_row(row, "float4_e2m1fn_x2", (6,))  # two values in each of its bytes
    assert believes_row(row, "float4_e2m1fn_x2", (3,))
    assert not believes_row(fraction, "int32", (6,))
    assert not believes_row(huge, "int32", (6,))  # no integer of a COMMIT
    assert believes_row(huge, "float64", (6,))
    assert not any(believes_row(pack(StatsRow()), dtype, (0,)) for dtype in NO_ROW_DTYPES)


def test_no_bit_pattern_of_a_row_does_harm() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        assert not believes_row(random.bytes(ROW_NBYTES), "float32", (2, 3))
    signalling = np.full(ROW_VALUES, 0x7FF0_0000_0000_0001, "u8")
    assert not believes_row(signalling.tobytes(), "float32", (2, 3))
