"""Detects models that may be one stage of a pipeline, so other ranks have the missing layers and modules."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Optional

__all__ = ["may_be_a_stage"]

_PIPELINES = ("torch.distributed.pipelining", "megatron.core.pipeline_parallel", "deepspeed.runtime.pipe")


def may_be_a_stage(layers: Iterable[Optional[int]], world_size: int) -> bool:
    """Return whether a model may be one stage of a pipeline. The imports of the job count, too.

    Args:
        layers: The numbers of the model's layers; None for a module outside of a layer list.
        world_size: The number of ranks.
    """
    first = min((layer for layer in layers if layer is not None), default=0)
    return world_size > 1 and (first > 0 or not sys.modules.keys().isdisjoint(_PIPELINES))
