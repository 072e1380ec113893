"""The identity of a captured tensor (Key) and of its capture in time (Moment).

Both are plain msgspec structs, shared by the job, the wire, the daemon and the store. Importing this module imports no
torch.
"""

from __future__ import annotations

from typing import Annotated, Optional

import msgspec
from msgspec import Meta

__all__ = ["MAX_INDEX", "MAX_NAME_CHARS", "MAX_NDIM", "ORDINALS", "Key", "Moment"]

# A longer name is refused with a counted drop (`invalid_key`).
MAX_NAME_CHARS = 4096
MAX_NDIM = 16
# Indices are stored as SQLite integers.
MAX_INDEX = 2**63 - 1

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Index = Annotated[int, Meta(ge=0, le=MAX_INDEX)]
Rank = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Key(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True, forbid_unknown_fields=True):
    """The identity of a tensor. All records with one key and one dtype are one series.

    Attributes:
        quant_type: A label: bf16, fp16, fp8, mxfp8, mxfp4, nvfp4, hifp8 or the user's own word.
        rank: The global rank, 0-based.
        tensor_name: query, input, weight, output, grad_output, …
        layer: The layer's index, 0-based; None outside layers (lm_head, embeddings).
        phase: "pre" or "post".
        layer_type: attention, linear, …
        operation: forward, backward.
        component: FA, linear, …
        module: The qualified module name without wrappers.
        stack: The parent of the layer list (encoder, decoder).
    """

    quant_type: Name
    rank: Rank
    tensor_name: Name
    layer: Optional[Index] = None
    phase: Name = "pre"
    layer_type: Name = ""
    operation: Name = "forward"
    component: Name = ""
    module: Name = ""
    stack: Name = ""


class Moment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The time of a capture. `time_ns` is wall clock (time.time_ns); the other fields are ordinals.

    Attributes:
        call: How often this tap fired before in the same micro-batch.
        attempt: The number of the job's restarts.
        recompute: Whether activation checkpointing was running a forward again.
    """

    iteration: Index = 0
    micro_batch: Index = 0
    call: Index = 0
    sample_idx: Optional[Index] = None
    batch_idx: Optional[Index] = None
    sequence_idx: Optional[Index] = None
    attempt: Index = 0
    time_ns: Index = 0
    recompute: bool = False


ORDINALS = tuple(name for name in Moment.__struct_fields__ if name not in ("time_ns", "recompute"))
"""The fields of a moment that identify a record of its key, in order."""
