"""A run whose records make order matter: layers with calls, long series, many widths, and what cannot be measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from capd_client.protocol.key import Moment
from tests.kit.store.cli import StoreWriter, bf16_bits, linear_key

OPERANDS = (
    ("input", "forward", (16, 64)),
    ("weight", "forward", (32, 64)),
    ("grad_output", "backward", (16, 32)),
)


def varied_run(root: Path, name: str = "run", *, long: int = 140, seed: int = 1) -> Path:
    """Write a run: two layers with all operands, one series of `long` records, and tensors without a source."""
    rng, writer = np.random.default_rng(seed), StoreWriter(root)
    for iteration in range(long):
        for layer in (0, 1):
            for tensor, operation, shape in OPERANDS:
                if iteration >= 3 and (layer, tensor) != (0, "input"):
                    continue
                key = linear_key(
                    layer=layer, tensor_name=tensor, operation=operation, module=f"blocks.{layer}.mlp.fc1"
                )
                # Sums of such terms depend on their order, if they round.
                bits = bf16_bits(rng.normal(size=shape) * 10.0 ** -(iteration % 30))
                writer.put(name, key, bits, "bfloat16", Moment(iteration=iteration))
        if iteration < 7:
            key = linear_key(tensor_name="attn", module="attention")
            # More numbers of channels than a tally keeps, the smallest last.
            values = rng.normal(size=(4, 40 - 3 * iteration)).astype(np.float32)
            writer.put(name, key, values, "float32", Moment(iteration=iteration))
    writer.put(name, linear_key(tensor_name="ids"), np.arange(4), "int64", Moment())
    key = linear_key(quant_type="statistics")
    writer.put(name, key, bf16_bits(np.ones(8)), "bfloat16", Moment(), payload=False)
    writer.close()
    return root / f"{name}.zarr"


def wide_run(root: Path, series: int, *, side: int = 256) -> Path:
    """Write a run of many series with one record each, so that it has as many tasks as wanted."""
    rng, writer = np.random.default_rng(5), StoreWriter(root)
    for number in range(series):
        key = linear_key(layer=number, module=f"blocks.{number}.fc")
        writer.put("run", key, bf16_bits(rng.normal(size=(side, side))), "bfloat16", Moment())
    writer.close()
    return root / "run.zarr"
