"""Formats by name: which options a word means, and what a wrong one is told."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from capd.analyze.format_choice import DEFAULT_CHOICES, DEFAULT_FORMATS, choices
from capd.errors import ConfigError
from capd.formats import FORMATS, qdq


@pytest.mark.parametrize(
    ("text", "fmt", "options"),
    [
        ("mxfp8", "mxfp8", {}),
        ("mxfp8:e5m2:rceil", "mxfp8", {"elem": "e5m2", "scale_mode": "rceil"}),
        ("mxfp4:even", "mxfp4", {"scale_mode": "even"}),
        ("mxfp4:rounding=even", "mxfp4", {"rounding": "even"}),
        ("mxfp8:legacy:axis=0", "mxfp8", {"preset": "legacy", "axis": 0}),
        ("nvfp4:16x16:tensor_scale=no", "nvfp4", {"block": (16, 16), "tensor_scale": False}),
        ("fp8:128", "fp8", {"block": 128}),
        ("fp8:block=128x128:inf", "fp8", {"block": (128, 128), "overflow": "inf"}),
        ("hifp8:saturate:hybrid", "hifp8", {"overflow": "saturate", "rounding": "hybrid"}),
        ("bf16", "bf16", {}),
    ],
)
def test_words_behind_a_format_are_options_that_it_takes(
    text: str, fmt: str, options: dict[str, Any]
) -> None:
    [choice] = choices(f" {text} ")

    assert (choice.label, choice.fmt, choice.options) == (text, fmt, options)
    qdq(torch.ones(4, 32), choice.fmt, **choice.options)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mxfp9", f"unknown format 'mxfp9'; known: {', '.join(FORMATS)}"),
        ("mxfp8,", "unknown format ''; known"),
        ("mxfp8:e2m1", "mxfp8 has no option 'e2m1'; known: e4m3, e5m2, floor, ceil, even, rceil, away, stochastic"),
        ("mxfp8:e5m2:e4m3", "elem is given twice"),
        ("hifp8:32", "hifp8 has no scales, so it takes no block"),
        ("mxfp8:block=many", "block of mxfp8 cannot be 'many'"),
        ("mxfp8:axis=rows", "axis of mxfp8 cannot be 'rows'"),
        ("fp8:legacy", "fp8 has no option 'legacy'"),
        ("nvfp4:tensor_scale=maybe", "tensor_scale of nvfp4 cannot be 'maybe'"),
        ("mxfp8:colour=red", "mxfp8 has no option 'colour=red'"),
    ],
)  # fmt: skip
def test_what_is_no_format_or_no_option_is_refused_with_what_is_known(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        choices(text)


def test_formats_with_blocks_are_taken_along_each_axis_and_the_others_once() -> None:
    found = choices("mxfp8,hifp8,fp8,nvfp4:axis=0,mxfp8", axes=(-1, -2))

    assert [choice.label for choice in found] == ["mxfp8", "mxfp8:axis=-2", "hifp8", "fp8", "nvfp4:axis=0"]
    assert [choice.axis for choice in found] == [-1, -2, None, None, 0]


def test_the_default_choices_are_the_default_formats() -> None:
    assert choices(DEFAULT_FORMATS) == DEFAULT_CHOICES
