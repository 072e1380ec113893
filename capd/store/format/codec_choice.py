"""Which codec a new series gets: a preset by dtype, or the best of a few, tried on its first record.

Blosc needs the explicit 1 MiB block: its automatic block is smaller than zstd's 128 KiB literal blocks times
the item size, so exponent and mantissa bytes would share one Huffman table (1.27x instead of 1.45x on bf16).
Higher zstd levels are several times slower and no better on such data, so none is a candidate.
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
_WORTH = 0.02  # of the raw size: what a slower candidate must save
_DEGENERATE = 8.0  # a first record that shrinks this much (all zeros, say) tells nothing about the next ones


def codec_name(setting: str, dtype: str, sample: memoryview | bytes, *, is_small: bool = False) -> str:
    """The explicit codec name that `setting` (a preset or an explicit name) means for a series of `dtype`.

    sample: raw bytes of the series' first record; only `auto` looks at them. is_small: records share chunks, whose
    empty part must shrink: no preset gives them `none`. Raises ConfigError for an unknown name.
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
    """The cheapest codec whose result on `sample` is within 2 % of the raw size of the smallest result.

    sample: stored bits of at most about 512 KiB. Deterministic: sizes decide, not times. An empty sample, or one
    that nearly vanishes, gets the dtype's default.
    """
    default = _preset("default", dtype)
    candidates = dict.fromkeys(("none", _BITS, "zstd:1", default))  # from cheap to expensive
    sizes = {name: chain_for(name, dtype).encode(sample).nbytes for name in candidates} if sample.size else {}
    smallest = min(sizes.values(), default=0)
    if smallest * _DEGENERATE < sample.nbytes or not sizes:
        return default
    return next(name for name, size in sizes.items() if size <= smallest + _WORTH * sample.nbytes)
