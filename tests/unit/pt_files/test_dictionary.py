"""What a file's dictionary says its record is: its own word for capd's files, else metadata, name, directory."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from capd.pt_files.dictionary import capture_of
from capd.pt_files.names import name_parts
from capd.pt_files.pickle_scan import BadTensorFile
from capd_client.protocol.key import Key, Moment
from tests.kit.store.pt_files import SEED_NAME, seed_dictionary

SAVED_NS = int(time.mktime(time.strptime("2025-09-08 09:52:20", "%Y-%m-%d %H:%M:%S"))) * 10**9
NOTHING = dict.fromkeys(
    ("layer_type", "operation", "quant_type", "tensor_name", "layer_idx", "phase", "component", "rank", "sample_idx",
     "iteration", "save_time", "experiment")
)  # fmt: skip


def capture(name: str = SEED_NAME, directory: str = "mxfp8", base: int = 0, **metadata: Any) -> Any:
    return capture_of(seed_dictionary(torch.ones(2), **metadata), name_parts(name), directory, base)


def test_metadata_say_everything() -> None:
    found = capture("nonsense.pt", "elsewhere")

    assert found.key == Key(
        quant_type="mxfp8", rank=3, layer=1, phase="pre", layer_type="linear", operation="forward",
        component="linear", tensor_name="input",
    )  # fmt: skip
    assert found.moment == Moment(iteration=5, sample_idx=4, time_ns=SAVED_NS)
    assert (found.device, found.requires_grad, found.is_leaf) == ("cuda:3", True, False)
    assert json.loads(found.metadata) == {"experiment": "test_run"}


def test_metadata_come_before_the_name_and_the_name_before_the_directory() -> None:
    name = "20250908_095220_0001_iter007_attention_L9_backward_post_FA_bf16_rank8_sample6_value.pt"

    assert capture(name).key.layer == 1
    from_name = capture(name, **NOTHING)
    assert from_name.key == Key(
        quant_type="bf16", rank=8, layer=9, phase="post", layer_type="attention", operation="backward",
        component="FA", tensor_name="value",
    )  # fmt: skip
    assert from_name.moment == Moment(iteration=7, sample_idx=6, time_ns=SAVED_NS)
    assert capture("x.pt", "hifp8", **{**NOTHING, "tensor_name": "input"}).key == Key(
        quant_type="hifp8", rank=0, tensor_name="input"
    )


def test_a_group_of_a_later_name_is_the_call() -> None:
    name = "20250923_100142_0001_iter000_linear_L1_forward_pre_linear_bf16_rank00_group003_input.pt"

    assert capture(name, **NOTHING).moment.call == 3


def test_the_first_layer_may_have_been_called_1() -> None:
    assert capture(base=1).key.layer == 0
    assert capture(base=1, layer_idx=None, name="x.pt").key.layer is None
    with pytest.raises(BadTensorFile, match="--layer-base 0"):
        capture(base=1, layer_idx=0)


def test_a_file_without_any_name_of_its_tensor_is_refused() -> None:
    with pytest.raises(BadTensorFile, match="which tensor it is"):
        capture("x.pt", **NOTHING)


def test_metadata_that_json_lacks_become_text() -> None:
    found = capture(
        shape=torch.Size([2, 3]), dtype=torch.bfloat16, nan=float("nan"), inner={1: (True, None, 0.5)}
    )

    assert json.loads(found.metadata) == {
        "experiment": "test_run",
        "shape": [2, 3],
        "dtype": "torch.bfloat16",
        "nan": "nan",
        "inner": {"1": [True, None, 0.5]},
    }


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (torch.ones(2), "no dictionary"),
        ({"weight": torch.ones(2)}, "no dictionary"),
        ({"tensor": [1.0]}, "no dictionary"),
        ({"tensor": torch.ones(2), "metadata": []}, "no dictionary"),
        ({"tensor": torch.ones(2), "tensor_info": 3}, "no dictionary"),
        (seed_dictionary(torch.ones(2), rank=-1), "rank"),
        (seed_dictionary(torch.ones(2), rank="3"), "rank"),
        (seed_dictionary(torch.ones(2), layer_idx=1.5), "layer"),
        (seed_dictionary(torch.ones(2), iteration=2**70), "name a record"),
        (seed_dictionary(torch.ones(2), tensor_name="x" * 5000), "tensor_name"),
        (seed_dictionary(torch.ones(2), tensor_name="\ud800"), "cannot be kept"),
        (seed_dictionary(torch.ones(2), notes="x" * 5000), "more than the 4096"),
        (seed_dictionary(torch.ones(2), notes="\ud800"), "kept as JSON"),
        (seed_dictionary(torch.ones(2), notes=10**5000), "kept as JSON"),
        (seed_dictionary(torch.ones(2), capd={"key": {}}), "name a record"),
        (seed_dictionary(torch.ones(2), capd={"format": 2}), "newer capd"),
        (seed_dictionary(torch.ones(2), capd="yes"), "name a record"),
    ],
)
def test_wrong_dictionaries_are_refused(content: Any, why: str) -> None:
    with pytest.raises(BadTensorFile, match=why):
        capture_of(content, name_parts(SEED_NAME), "mxfp8", 0)


def test_attributes_that_no_store_could_hold_are_refused() -> None:
    origin = {
        "format": 1, "run": "r", "series": "s", "record": 0, "key": {"quant_type": "q", "rank": 0, "tensor_name": "t"},
        "moment": {}, "metadata": {},
    }  # fmt: skip

    assert capture(capd={**origin, "attributes": {"world": 8}}).attributes == {"world": 8}
    for wrong in ({"n": 2**70}, {"n": "\ud800"}, {"n": "x" * (65 << 10)}):
        with pytest.raises(BadTensorFile, match="its metadata"):
            capture(capd={**origin, "attributes": wrong})
    with pytest.raises(BadTensorFile, match="unknown field"):
        capture(capd={**origin, "attributes": {}, "moment": {"era": 3}})


def test_metadata_that_share_their_parts_without_end_are_refused() -> None:
    laughing: list[Any] = []
    for _ in range(60):
        laughing = [laughing, laughing]

    with pytest.raises(BadTensorFile, match="too many values"):
        capture(lol=laughing)
