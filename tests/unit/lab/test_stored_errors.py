"""The stored form of errors: read back as they were measured, found by their capture, and refused if damaged."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from capd.analyze.error_sums import merged
from capd.analyze.format_choice import choices
from capd.errors import DamagedRecord
from capd.lab.measuring import measured_bits
from capd.lab.sampling import is_in_sample, is_source, parse_sample
from capd.lab.stored_errors import StoredErrors, errors_among, pack_row, unpack_row
from capd.store.format.frames import RecordHead
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.scalars import scalar_key

CHOICES = choices("fp8,mxfp8,mxfp8:e5m2:rceil,mxfp4,nvfp4:16x16,hifp8,fp16")


def row(client: bytes, sequence: int, seed: int) -> StoredErrors:
    torch.manual_seed(seed)
    values = torch.randn(64, 96) * torch.exp(20 * torch.randn(64, 96))
    values[3, 5], values[7, 1] = float("nan"), float("inf")
    errors, problems = measured_bits(values.numpy(), "float32", CHOICES)
    return StoredErrors(client, sequence, errors, problems)


def test_sums_come_back_to_the_bit_and_merge_as_before() -> None:
    rows = [row(b"c" * 16, n, n) for n in range(3)]
    back = [unpack_row(pack_row(one)) for one in rows]
    assert back == rows
    for label in rows[0].errors:
        before = merged(one.errors[label] for one in rows)
        after = merged(one.errors[label] for one in back)
        assert before == after
        assert (before.sqnr_db, before.sqnr_db_error) == (after.sqnr_db, after.sqnr_db_error)


def test_a_tensor_that_a_format_does_not_take_says_why() -> None:
    errors, problems = measured_bits(np.array(3.0, np.float32), "float32", choices("hifp8,mxfp8:axis=-2"))
    assert list(errors) == ["hifp8"]
    assert problems[0].startswith("mxfp8:axis=-2: ")
    assert unpack_row(pack_row(StoredErrors(b"", 1, errors, problems))).problems == problems


def test_the_errors_of_a_record_are_those_of_its_capture_and_no_other_at_its_moment() -> None:
    one, other = row(b"a" * 16, 7, 0), row(b"b" * 16, 7, 1)
    head = RecordHead(b"b" * 16, 7, (64, 96), 64 * 96 * 4, Moment())
    assert errors_among([pack_row(one), pack_row(other)], head) == other.errors
    assert errors_among([pack_row(one)], head) == {}


@pytest.mark.parametrize("cut", [0, 1, 2, 40, -1])
def test_damaged_rows_are_named(cut: int) -> None:
    data = pack_row(row(b"a" * 16, 1, 0))
    with pytest.raises(DamagedRecord, match="the errors of a record"):
        unpack_row(data[:cut])


def test_a_row_of_a_newer_form_is_refused() -> None:
    with pytest.raises(DamagedRecord, match="a form that this version of capd does not know"):
        unpack_row(b"\x02" + pack_row(row(b"a" * 16, 1, 0))[1:])


def test_the_sample_takes_whole_calls() -> None:
    assert [parse_sample(text) for text in ("1/1", "1/8", "1/999999999")] == [1, 8, 999_999_999]
    moments = [
        Moment(iteration=i, micro_batch=m, call=c) for i in range(8) for m in range(4) for c in range(2)
    ]
    taken = [one for one in moments if is_in_sample(one, 4)]
    assert len(taken) == len(moments) // 4
    assert {one.iteration for one in taken} == set(range(8))
    assert all((one.iteration + one.micro_batch + one.call) % 4 == 0 for one in taken)


def test_scalars_other_dtypes_and_parts_of_quantised_tensors_are_no_source() -> None:
    key = Key(quant_type="bf16", rank=0, tensor_name="input")
    assert is_source(key, "bfloat16", {})
    assert not is_source(key, "float8_e4m3fn", {})
    assert not is_source(key, "bfloat16", {"tensor_class": "Float8Tensor"})
    assert not is_source(scalar_key("loss", 0), "float64", {})
