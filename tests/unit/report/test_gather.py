"""Gathering with formats: tallies with errors and channels, and what has no high-precision source."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from capd.analyze.errors import errors_of, merged
from capd.analyze.format_choice import choices
from capd.io.items import Item, Loaded
from capd.report.gather import BY_LAYER, BY_TENSOR, GatheredRecords, gather
from capd_client.protocol.key import Key, Moment

RNG = np.random.default_rng(9)
CHOICES = choices("mxfp8,hifp8,fp8,mxfp4:axis=-2")


def item(number: int, bits: np.ndarray, dtype: str, layer: int | None = 0, **attributes: str) -> Item:
    key = Key(quant_type="bf16", rank=0, tensor_name="input", layer=layer)
    loaded = Loaded(key, Moment(iteration=number), dtype, bits.nbytes, None, lambda: bits, attributes)
    return Item(f"path/of/{dtype}{layer}#{number}", bits.nbytes, lambda: loaded)


@pytest.mark.parametrize("threads", [1, 3])
def test_tallies_carry_the_merged_errors_of_each_format_and_the_channels(threads: int) -> None:
    tensors = [
        torch.from_numpy(RNG.normal(size=(40, 64)).astype(np.float32)).to(torch.bfloat16) for _ in range(6)
    ]
    bits = [tensor.view(torch.int16).numpy().view(np.uint16) for tensor in tensors]
    items = [item(number, each, "bfloat16", number % 2) for number, each in enumerate(bits)]
    gathered = GatheredRecords()

    assert list(gather(items, gathered, threads=threads, choices=CHOICES, channels=True)) == [5120] * 6

    by_layer = gathered.groups.by(*BY_LAYER)
    for layer in (0, 1):
        for choice in CHOICES:
            found = by_layer["bf16", "input", layer].errors[choice.label]
            each = [errors_of(tensor, choice) for tensor in tensors[layer::2]]
            assert (found.records, found.underflows) == (3, sum(one.underflows for one in each))
            assert found.sqnr_db == pytest.approx(merged(each).sqnr_db, rel=1e-12)
            assert found.blocks == merged(each).blocks
    [whole] = gathered.groups.by(*BY_TENSOR).values()
    every = np.abs(torch.stack(tensors).double().numpy()).reshape(-1, 64)
    np.testing.assert_array_equal(whole.channels[64].amax, every.max(0))
    assert (whole.channels[64].records, whole.errors["mxfp8"].records) == (6, 6)
    assert gathered.groups.whole().channels == {}  # kept where they mean something
    assert gathered.unmeasured == {}


def test_without_being_asked_nothing_is_measured() -> None:
    gathered = GatheredRecords()

    list(gather([item(0, np.ones((4, 4), np.float32), "float32")], gathered, threads=1))

    assert (gathered.groups.whole().errors, gathered.unmeasured) == ({}, {})


def test_records_without_a_high_precision_source_are_counted_with_the_reason() -> None:
    plain = partial(np.ones, (4, 32))
    items = [
        item(0, plain(np.uint8), "float8_e4m3fn"),
        item(1, plain(np.uint8), "float8_e4m3fn"),
        item(2, plain(np.int64), "int64"),
        item(3, plain(np.float32), "float32", tensor_class="torchao.MXTensor"),
        item(4, plain(np.float32), "float32"),
        item(5, np.ones(32, np.float32), "float32", None),  # no second last axis
    ]
    gathered = GatheredRecords()

    assert len(list(gather(items, gathered, threads=2, choices=CHOICES))) == 6

    assert gathered.skipped == []
    assert gathered.groups.whole().records == 6
    assert {label: errors.records for label, errors in gathered.groups.whole().errors.items()} == {
        "mxfp8": 2, "hifp8": 2, "fp8": 2, "mxfp4:axis=-2": 1,
    }  # fmt: skip
    known = {name: (reason, count) for (name, reason), count in gathered.unmeasured.items()}
    assert known["path/of/float8_e4m3fn0"] == (
        "float8_e4m3fn is no high-precision source; these are bfloat16, float16, float32, float64", 2,
    )  # fmt: skip
    assert known["path/of/int640"][1] == 1
    assert known["path/of/float320"] == ("it is a part of a quantised tensor (torchao.MXTensor)", 1)
    assert known["path/of/float32None"][0].startswith("mxfp4:axis=-2: axis of mxfp4 cannot be -2")
