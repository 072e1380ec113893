"""Whether a model may be one stage of a pipeline, so that other ranks have the layers and modules that it lacks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Optional

__all__ = ["may_be_a_stage"]

_PIPELINES = ("torch.distributed.pipelining", "megatron.core.pipeline_parallel", "deepspeed.runtime.pipe")


def may_be_a_stage(layers: Iterable[Optional[int]], world_size: int) -> bool:
    """From the numbers of its layers, the size of the job, and what the job has imported."""
    first = min((layer for layer in layers if layer is not None), default=0)
    return world_size > 1 and (first > 0 or not sys.modules.keys().isdisjoint(_PIPELINES))
