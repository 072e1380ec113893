"""Rows of torch.distributed.pipelining on two ranks: stages learn shapes by a trial before each schedule begins."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from tests.integration.three_ways.three_ways_rows import STEPS, Losses, Row
from tests.integration.three_ways.three_ways_sharded import begin
from tests.kit.models.sharded_models import Stage, batch, loss_of

if TYPE_CHECKING:
    from tests.integration.three_ways.three_ways_job import Script

CHUNKS = 4  # micro-batches of one schedule step


class Told(PipelineStage):
    """A stage that says which micro-batch it runs, as its schedule numbers them; a trial is none."""

    script: Script
    step = 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.script.at(self.step, fwd_chunk_id)
        result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.script.off()
        return result

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.script.backward_of(self.step, bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.script.backward_of(self.step, bwd_chunk_id)
        return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


def pipeline(
    script: Script, kind: str, stages: int = 1, *, folded: bool = False, compiled: bool = False
) -> Losses:
    """stages: of each rank. folded: a rank has one of each end, as in a V."""
    begin("pp")
    rank, world = dist.get_rank(), dist.get_world_size()
    count = stages * world
    parts = [Stage(number, count) for number in range(count)]
    mine = [parts[number] for number in ([rank, count - 1 - rank] if folded else range(rank, count, world))]
    made = []
    for part in mine:
        script.watch(part, name=f"stage{part.number}")
        if compiled:
            part.compile(backend="aot_eager")
        stage = Told(part, part.number, count, torch.device("cpu"))
        stage.script = script
        made.append(stage)
    run: Any = getattr(schedules, kind)(
        made[0] if stages == 1 else made, n_microbatches=CHUNKS, loss_fn=loss_of
    )
    optimizer = torch.optim.SGD([p for part in mine for p in part.parameters()], lr=0.1)
    losses: Losses = []
    for step in range(STEPS):
        Told.step = step
        chunks = [batch(step, chunk) for chunk in range(CHUNKS)]
        words, targets = (torch.cat(tensors) for tensors in zip(*chunks, strict=True))
        first, last = (any(part.number == number for part in mine) for number in (0, count - 1))
        run.step(*([words] if first else []), **({"target": targets, "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(parameter.detach().sum() for part in mine for parameter in part.parameters())]


_IMPORTS = ("torch.distributed.pipelining",)

ROWS: dict[str, Row] = {
    "gpipe": Row(partial(pipeline, kind="ScheduleGPipe"), ranks=2, imports=_IMPORTS),
    "one_f_one_b": Row(partial(pipeline, kind="Schedule1F1B"), ranks=2, imports=_IMPORTS),
    "one_f_one_b_compiled": Row(
        partial(pipeline, kind="Schedule1F1B", compiled=True), ranks=2, imports=_IMPORTS
    ),
    "looped_bfs": Row(partial(pipeline, kind="ScheduleLoopedBFS", stages=2), ranks=2, imports=_IMPORTS),
    "interleaved": Row(
        partial(pipeline, kind="ScheduleInterleaved1F1B", stages=2), ranks=2, imports=_IMPORTS
    ),
    "zero_bubble": Row(
        partial(pipeline, kind="ScheduleInterleavedZeroBubble", stages=2), ranks=2, imports=_IMPORTS
    ),
    "zero_bubble_v": Row(
        partial(pipeline, kind="ScheduleZBVZeroBubble", stages=2, folded=True), ranks=2, imports=_IMPORTS
    ),
}
