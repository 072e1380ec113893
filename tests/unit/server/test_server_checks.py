"""Descriptors are checked field by field before a byte of the arena is touched."""

from __future__ import annotations

import pytest

from capd.server.checks import MAX_METADATA_DEPTH, define_problem, descriptor_problem
from capd_client.dtypes import ITEM_NBYTES
from capd_client.key import Key, Moment
from capd_client.protocol import Define, Descriptor

ARENA = 1 << 20
KEY = Key(quant_type="bf16", rank=0, tensor_name="x")
BF16 = Define(id=0, key=KEY, dtype="bfloat16")


def descriptor(
    offset: int = 4096, nbytes: int = 12, shape: tuple[int, ...] = (2, 3), metadata: str = ""
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
        descriptor(metadata='{"loss": 1.5, "nested": {"a": [1]}}'),
        descriptor(metadata='{"a":[' + "[]," * 100 + "[]]}"),
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
        (descriptor(metadata="[1]"), "metadata"),
        (descriptor(metadata="{"), "metadata"),
        (descriptor(metadata='{"a":' * 500 + "1" + "}" * 500), "metadata"),
        (descriptor(metadata='{"a":' + "[" * 65 + "]" * 65 + "}"), "metadata"),
    ],
)
def test_contradicting_descriptors_are_named(bad: Descriptor, says: str) -> None:
    problem = descriptor_problem(bad, BF16, ARENA)

    assert problem is not None
    assert says in problem


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
    attributes = {"layout": [1, None, "x"], "deep": nested(MAX_METADATA_DEPTH - 1), "scale": 0.5}
    assert define_problem(Define(id=0, key=KEY, dtype="bfloat16", attributes=attributes)) is None


def test_undefined_keys_and_unknown_dtypes_are_named() -> None:
    assert "never defined" in str(descriptor_problem(descriptor(), None, ARENA))
    assert "complex64" in str(
        descriptor_problem(descriptor(), Define(id=0, key=KEY, dtype="complex64"), ARENA)
    )
