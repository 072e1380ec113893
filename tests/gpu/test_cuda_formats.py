"""Number formats on a CUDA device: the same bits as on the CPU, which other tests hold against the packages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from capd.formats import FORMATS, decode, encode, qdq

pytestmark = pytest.mark.gpu

CASES: list[tuple[str, dict[str, Any]]] = [
    *((fmt, {}) for fmt in FORMATS),
    *(
        ("mxfp8", {"elem": elem, "scale_mode": mode})
        for elem in ("e4m3", "e5m2")
        for mode in ("ceil", "even", "rceil")
    ),
    ("fp8", {"block": (128, 128), "elem": "e5m2"}),
    ("nvfp4", {"block": (16, 16)}),
    ("nvfp4", {"tensor_scale": False, "axis": 0}),
    ("hifp8", {"rounding": "hybrid", "overflow": "saturate"}),
]

# Around the largest of E4M3 (448; 464 rounds down), E5M2 (57344; 61440 rounds up), HiF8 (32768), FP16 and bf16. A
# device's own conversion may saturate what the CPU's makes infinite or NaN: none of that may be seen here.
BEYOND = [
    448.0,
    464.0,
    465.0,
    -480.0,
    57344.0,
    -61440.0,
    61441.0,
    32768.0,
    40960.0,
    65504.0,
    -65520.0,
    3.4e38,
]


@pytest.mark.parametrize(("fmt", "options"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cuda_tensor_has_the_bits_of_the_cpu(fmt: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(300, 200, generator=generator) * torch.logspace(-30, 30, 300)[:, None]
    values[7, 9], values[8, 10], values[9] = torch.inf, torch.nan, -0.0
    values[10:14] = torch.tensor(BEYOND).repeat(17)[:200]  # rows of nothing else: whole blocks of such values
    values[20, ::3] = 1e30  # and beside ordinary ones
    values = values.to(dtype)
    on_cpu, on_cuda = encode(values, fmt, **options), encode(values.cuda(), fmt, **options)

    for ours, theirs in ((on_cpu.payload, on_cuda.payload), (on_cpu.scale, on_cuda.scale)):
        if ours is not None and theirs is not None:
            assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.cpu().reshape(-1).view(torch.uint8))
    torch.testing.assert_close(decode(on_cuda).cpu(), decode(on_cpu), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        qdq(values.cuda(), fmt, **options).cpu(), qdq(values, fmt, **options), rtol=0, atol=0, equal_nan=True
    )
