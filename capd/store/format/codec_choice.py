"""The codec of a new series: a preset by dtype, or the best of a few candidates on its first record.

Blosc needs the explicit block of 1 MiB. Its automatic block is smaller than zstd's literal blocks of 128 KiB times the
item size. Exponent and mantissa bytes would then share one Huffman table (1.27x instead of 1.45x on bf16). Higher zstd
levels are several times slower and no better on such data, so none of them is a candidate.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from capd.store.format.codecs import chain_for, parse_codec
from capd.store.format.dtypes import stored_type

__all__ = ["SAMPLE_NBYTES", "choose", "codec_name"]

_PLANES = "blosc:zstd:1:shuffle:1048576"
_BITS = "blosc:lz4:5:bitshuffle"
_WIDE_FLOATS = frozenset({"bfloat16", "float16", "float32", "float64"})
SAMPLE_NBYTES = 512 << 10
# The share of the raw size that a slower candidate must save.
_WORTH = 0.02
# A first record that shrinks by this factor (all zeros, for example) does not predict the next ones.
_DEGENERATE = 8.0


def codec_name(setting: str, dtype: str, sample: memoryview | bytes, *, is_small: bool = False) -> str:
    """Return the explicit codec name for a series of `dtype`.

    Args:
        setting: A preset (`auto`, `default`, `fast`) or an explicit codec name.
        dtype: The series' dtype name.
        sample: Raw bytes of the series' first record. Only `auto` reads them.
        is_small: Whether records share chunks. The empty part of such a chunk must shrink, so no preset gives `none`.

    Raises:
        ConfigError: The codec name is unknown.
    """
    if setting == "auto":
        stored = stored_type(dtype).stored
        usable = min(len(sample), SAMPLE_NBYTES) // stored.itemsize * stored.itemsize
        found = choose(np.frombuffer(sample[:usable], dtype=stored), dtype)
    elif setting in ("default", "fast"):
        found = _preset(setting, dtype)
    else:
        parse_codec(setting)
        return setting
    return _BITS if found == "none" and is_small else found


def _preset(preset: str, dtype: str) -> str:
    if dtype in _WIDE_FLOATS:
        return _BITS if preset == "fast" else _PLANES
    if dtype == "float8_e8m0fnu":
        return "zstd:3"
    return "none" if preset == "fast" else "zstd:1"


def choose(sample: NDArray[np.generic], dtype: str) -> str:
    """Return the cheapest codec whose result on a sample of stored bits is nearly the smallest.

    The difference to the smallest result is at most 2 % of the raw size. The choice is deterministic: sizes decide, not
    times. A sample that is empty or nearly vanishes gets the dtype's default.
    """
    default = _preset("default", dtype)
    # From cheap to expensive.
    candidates = dict.fromkeys(("none", _BITS, "zstd:1", default))
    sizes = {name: chain_for(name, dtype).encode(sample).nbytes for name in candidates} if sample.size else {}
    smallest = min(sizes.values(), default=0)
    if smallest * _DEGENERATE < sample.nbytes or not sizes:
        return default
    return next(name for name, size in sizes.items() if size <= smallest + _WORTH * sample.nbytes)
