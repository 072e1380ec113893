"""File names: the seeds' examples are read, and what is written is read back."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capd.pt_files.names import SCHEMES, file_name, name_parts, stamp_of
from capd_client.protocol.key import Key, Moment

LINEAR = {"layer_type": "linear", "operation": "forward", "phase": "pre", "component": "linear"}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "20250908_091143_0001_attention_L0_forward_hifp8_query.pt",
            {
                "layer_type": "attention",
                "layer_idx": 0,
                "operation": "forward",
                "quant_type": "hifp8",
                "tensor_name": "query",
            },
        ),
        (
            "20250908_095220_0004_attention_L0_forward_post_FA_mxfp8_output.pt",
            {
                "layer_type": "attention",
                "layer_idx": 0,
                "operation": "forward",
                "phase": "post",
                "component": "FA",
                "quant_type": "mxfp8",
                "tensor_name": "output",
            },
        ),
        (
            "20241201_143022_0001_iter000_linear_L0_forward_post_linear_bf16_rank0_sample0_output.pt",
            {
                **LINEAR,
                "phase": "post",
                "iteration": 0,
                "layer_idx": 0,
                "quant_type": "bf16",
                "rank": 0,
                "sample_idx": 0,
                "tensor_name": "output",
            },
        ),
        (
            "20250923_100142_0001_iter000_linear_L1_forward_pre_linear_bf16_rank00_group000_input.pt",
            {
                **LINEAR,
                "iteration": 0,
                "layer_idx": 1,
                "quant_type": "bf16",
                "rank": 0,
                "group": 0,
                "tensor_name": "input",
            },
        ),
        (
            "20250914_022153_0003_iter000_linear_forward_pre_linear_hifp8_quantized_rank02_sample000_group012_input_A.pt",
            {
                **LINEAR,
                "iteration": 0,
                "quant_type": "hifp8_quantized",
                "rank": 2,
                "sample_idx": 0,
                "group": 12,
                "tensor_name": "input_A",
            },
        ),
        (
            "20250908_091143_12345_linear_backward_mxfp8_quantized_grad_output.pt",
            {
                "layer_type": "linear",
                "operation": "backward",
                "quant_type": "mxfp8_quantized",
                "tensor_name": "grad_output",
            },
        ),
    ],
)
def test_names_of_every_scheme_are_read(name: str, fields: dict[str, object]) -> None:
    parts = name_parts(name)

    assert parts is not None
    assert parts.fields == fields
    assert name.startswith(f"{parts.stamp}_{parts.counter:04d}_")


@pytest.mark.parametrize(
    "name", ["weights.pt", "20250908_0001_linear.pt", "20250908_091143_0001_x_y_z.pt", ".pt"]
)
def test_other_names_are_of_no_scheme(name: str) -> None:
    assert name_parts(name) is None


def test_each_scheme_gives_the_seeds_own_examples() -> None:
    key = Key(
        quant_type="mxfp8", rank=0, layer=0, phase="pre", layer_type="attention", operation="forward",
        component="FA", tensor_name="query",
    )  # fmt: skip
    names = [file_name(scheme, key, Moment(), 0, "20250908_095220", 1) for scheme in SCHEMES]

    assert names == [
        "20250908_095220_0001_attention_L0_forward_mxfp8_query.pt",
        "20250908_095220_0001_attention_L0_forward_pre_FA_mxfp8_query.pt",
        "20250908_095220_0001_iter000_attention_L0_forward_pre_FA_mxfp8_rank0_sample0_query.pt",
    ]


words = st.text(st.characters(categories=("L", "N", "P", "Zs", "Cs")), max_size=300)
numbers = st.integers(0, 2**63 - 1)


@given(
    st.sampled_from(SCHEMES),
    words,
    words,
    words,
    words,
    words,
    words,
    numbers,
    st.integers(0, 2**31 - 1),
    numbers,
)
def test_any_key_gives_a_name_that_a_directory_takes(
    scheme: str, a: str, b: str, c: str, d: str, e: str, f: str, number: int, rank: int, counter: int
) -> None:
    key = Key(
        quant_type=a, tensor_name=b, layer_type=c, operation=d, component=e, phase=f, rank=rank, layer=number
    )
    moment = Moment(iteration=number, sample_idx=number)

    name = file_name(scheme, key, moment, key.layer, stamp_of(0), counter)  # type: ignore[arg-type]

    assert len(name.encode()) <= 255
    assert "/" not in name
    assert name.isprintable()


@given(st.sampled_from(SCHEMES), numbers, st.integers(0, 2**31 - 1), st.integers(0, 10**9))
def test_what_is_written_is_read_back(scheme: str, number: int, rank: int, counter: int) -> None:
    key = Key(**LINEAR, quant_type="mxfp4", tensor_name="grad_weight", rank=rank, layer=number % 10**18)
    moment = Moment(iteration=number % 10**18, sample_idx=number % 10**18)

    parts = name_parts(file_name(scheme, key, moment, key.layer, "20250908_095220", counter))  # type: ignore[arg-type]

    assert parts is not None
    assert (parts.stamp, parts.counter) == ("20250908_095220", counter)
    said = parts.fields
    assert (said["layer_idx"], said["quant_type"], said["tensor_name"]) == (key.layer, "mxfp4", "grad_weight")
    if scheme == "C":
        assert (said["rank"], said["iteration"], said["sample_idx"]) == (rank, *[number % 10**18] * 2)


def test_stamps_are_local_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Shanghai")
    time.tzset()
    try:
        assert stamp_of(1_757_297_540 * 10**9) == "20250908_101220"
    finally:
        monkeypatch.undo()
        time.tzset()
