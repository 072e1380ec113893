"""The sample of a lab: which calls are measured, and which records can be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from capd_client.protocol.key import Key, Moment
from capd_client.protocol.scalars import is_scalar

__all__ = ["SOURCE_DTYPES", "is_in_sample", "is_source", "parse_sample"]

SOURCE_DTYPES = ("bfloat16", "float16", "float32", "float64")
"""The dtypes of high-precision values, on which the error of a format can be measured."""

_SAMPLE = re.compile(r"1/([1-9]\d{0,8})")


def parse_sample(text: object) -> int:
    """Return N of a sample "1/N".

    Raises:
        ValueError: It is none.
    """
    found = _SAMPLE.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"{text!r} is no sample; write 1/N, such as 1/8, or 1/1 for all")
    return int(found[1])


def is_in_sample(moment: Moment, of: int) -> bool:
    """Return whether a call is in a sample of one call in `of`. All tensors of a call are, or none."""
    return (moment.iteration + moment.micro_batch + moment.call) % of == 0


def is_source(key: Key, dtype: str, attributes: Mapping[str, Any]) -> bool:
    """Return whether records of a series are tensors of high precision."""
    return dtype in SOURCE_DTYPES and "tensor_class" not in attributes and not is_scalar(key)
