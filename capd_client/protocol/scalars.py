"""The series of scalars: their keys, dtype and shape. A scalar is a record of one float64. No torch."""

from __future__ import annotations

from capd_client.protocol.key import Key, Rank

__all__ = ["DTYPE", "is_scalar", "scalar_key"]

DTYPE = "float64"
"""The dtype of every scalar. Its shape is ()."""


def scalar_key(name: str, rank: Rank) -> Key:
    """Return the key of a scalar's series."""
    return Key(
        quant_type="scalar", rank=rank, tensor_name=name, phase="post", layer_type="scalar", operation="step"
    )


def is_scalar(key: Key) -> bool:
    """Return whether a key is that of a scalar: all of its fields except the name and the rank are fixed."""
    return key.quant_type == "scalar" and key == scalar_key(key.tensor_name, key.rank)
