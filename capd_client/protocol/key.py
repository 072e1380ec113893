"""What a captured tensor is (Key) and when it was captured (Moment).

Both are plain msgspec structs, shared by the job, the wire, the daemon and the store; importing this
module imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Optional

import msgspec
from msgspec import Meta

__all__ = ["MAX_INDEX", "MAX_NAME_CHARS", "MAX_NDIM", "Key", "Moment"]

MAX_NAME_CHARS = 4096  # longer names are refused with a counted drop (`invalid_key`)
MAX_NDIM = 16
MAX_INDEX = 2**63 - 1  # indices are stored as SQLite integers

Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Index = Annotated[int, Meta(ge=0, le=MAX_INDEX)]
Rank = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Key(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True, forbid_unknown_fields=True):
    """What a tensor is: all records with one key and one dtype make one series.

    quant_type: bf16, fp16, fp8, mxfp8, mxfp4, nvfp4, hifp8 or the user's own word: a label.
    rank: global rank, 0-based. layer: 0-based, None where there is none (lm_head, embeddings).
    phase: "pre" or "post". layer_type: attention, linear, … operation: forward, backward.
    component: FA, linear, … tensor_name: query, input, weight, output, grad_output, …
    module: qualified module name without wrappers. stack: parent of the layer list (encoder, decoder).
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
    """When a tensor was captured. `time_ns` is wall clock (time.time_ns), the rest are ordinals.

    call: how often this tap fired before in the same micro-batch. attempt: restarts of the job.
    recompute: captured while activation checkpointing ran a forward again.
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
