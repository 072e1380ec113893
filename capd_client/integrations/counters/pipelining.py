"""The counter of torch.distributed.pipelining: its schedules say which micro-batch a forward belongs to, if any.

Before the first step every stage runs a forward and a backward to learn shapes. These runs count as trials.
Zero-bubble schedules run backwards in two parts. The stages' classes have all these methods. `frameworks` patches
them.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any, Optional

from capd_client.integrations.counters.patches import Around
from capd_client.steps import optimizer_steps
from capd_client.steps.clock import counting
from capd_client.steps.split_backward import inputs_only, weights_only
from capd_client.steps.trial_runs import trial

__all__ = ["METHODS", "MODULE"]

MODULE = "torch.distributed.pipelining.stage"


class _Rounds:
    """The micro-batch numbers of a stage through all schedule steps of one iteration."""

    def __init__(self) -> None:
        # Per stage: the optimizer steps before, the micro-batches of earlier schedule steps, and the last chunk.
        self._at: weakref.WeakKeyDictionary[Any, tuple[int, int, int]] = weakref.WeakKeyDictionary()

    def begin(self, stage: Any, chunk: int) -> int:
        """Return the micro-batch of a chunk whose forward begins. Every schedule step counts its chunks from 0."""
        steps = optimizer_steps.count()
        begun, before, last = self._at.get(stage, (steps, 0, -1))
        if begun != steps:
            before = 0
        elif chunk <= last:
            before += last + 1
        self._at[stage] = steps, before, chunk
        return before + chunk

    def of(self, stage: Any, chunk: int) -> int:
        """Return the micro-batch of a chunk of the current schedule step."""
        _, before, _ = self._at.get(stage, (0, 0, 0))
        return before + chunk


_rounds = _Rounds()
_weights: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The last micro-batch of each stage for which gradients of the weights are or were computed."""


def _forward_one_chunk(
    stage: Any, fwd_chunk_id: int, *_: Any, **__: Any
) -> Optional[AbstractContextManager[None]]:
    if not stage.has_backward:
        return None
    micro_batch = _rounds.begin(stage, fwd_chunk_id)
    return counting(lambda: (None, micro_batch))


def _prepare(*_: Any, **__: Any) -> AbstractContextManager[None]:
    return trial()


def _backward_weight_one_chunk(stage: Any, bwd_chunk_id: int, *_: Any, **__: Any) -> None:
    _weights[stage] = _rounds.of(stage, bwd_chunk_id)


def _backward(stage: Any, backward_type: str, *_: Any, **__: Any) -> Optional[AbstractContextManager[None]]:
    if backward_type == "input":
        return inputs_only()
    if backward_type == "weight" and stage in _weights:
        return weights_only(_weights[stage])
    return None


METHODS: tuple[tuple[str, str, Around], ...] = (
    ("_PipelineStageBase", "forward_one_chunk", _forward_one_chunk),
    ("_PipelineStageBase", "backward_weight_one_chunk", _backward_weight_one_chunk),
    ("_PipelineStageBase", "backward_maybe_with_nosync", _backward),
    ("PipelineStage", "_prepare_forward_infra", _prepare),
    ("PipelineStage", "_prepare_backward_infra", _prepare),
    ("_PipelineStage", "_prepare_forward_infra", _prepare),
)
"""Class, method, and the function called around it (`Patch.around`)."""
