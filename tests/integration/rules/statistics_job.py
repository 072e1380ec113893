"""Captures one tensor of every kind that statistics must get right, as its environment says.

python statistics_job.py
"""

from __future__ import annotations

import json

import torch

import capd_client


def tensors() -> dict[str, torch.Tensor]:
    """The same tensors in every process, by name."""
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(48, 64, generator=generator) * 30
    odd = wide.clone()
    odd[0, :6] = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-42])
    return {
        "float32": odd,
        "bfloat16": odd.to(torch.bfloat16),
        "float64": odd.double() * 1e100,  # beyond float32
        "squares_overflow": (wide * 500).to(torch.float16),  # up to about 60,000, whose square no fp16 holds
        "float8_e4m3fn": wide.clamp(-440, 440).to(torch.float8_e4m3fn),
        "float8_e5m2": odd.to(torch.float8_e5m2),
        "int32": (wide * 1e6).to(torch.int32),
        "int64": torch.tensor([-(2**63), 2**62, 2**53 + 1]),
        "uint8": wide.abs().to(torch.uint8),
        "bool": wide > 3,
        "nothing_finite": torch.tensor([float("nan"), float("inf")], dtype=torch.bfloat16),
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(-2.5),
        "strided": wide.t(),
        "large": torch.randn(1500, 1024, generator=generator).to(torch.bfloat16),  # through the encode pool
    }


def main() -> None:
    for name, tensor in tensors().items():
        capd_client.capture(tensor, tensor_name=name, iteration=1)
    flushed = capd_client.flush(60)
    print(json.dumps({"flushed": flushed, "counters": capd_client.counters()}))
    capd_client.close()


if __name__ == "__main__":
    main()
