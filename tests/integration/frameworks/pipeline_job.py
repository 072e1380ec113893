"""A rank of pipelines: every schedule trains a tiny transformer, first unwatched, then watched under its name.

    python pipeline_job.py FILE [SCHEDULE ...]

The schedules named, or those that are not checkpointed. Losses and parameters must be the same bits in both. What is
captured follows from SCHEDULES and sharded_models.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.distributed.pipelining import PipelineStage, schedules

import capd_client
from capd_client.protocol.kinds import ATTENTION, LINEAR
from tests.kit.models.sharded_models import (
    ROWS,
    STEPS,
    TOKENS,
    WIDTH,
    WORDS,
    Stage,
    batch,
    checkpointed,
    loss_of,
)

CHUNKS = 4  # micro-batches of one schedule step


class Schedule(NamedTuple):
    """kind: class of torch. stages: of each rank. folded: a rank has them from both ends, as in a V.

    rounds: schedule steps per optimizer step. compiled: the stages are. checkpointed: their blocks are, in this way.
    """

    kind: str
    stages: int = 1
    folded: bool = False
    rounds: int = 1
    compiled: bool = False
    checkpointed: CheckpointImpl | None = None


SCHEDULES = {
    "gpipe": Schedule("ScheduleGPipe", rounds=2),
    "one_f_one_b": Schedule("Schedule1F1B", compiled=True),
    "interleaved": Schedule("ScheduleInterleaved1F1B", stages=2),
    "zero_bubble": Schedule("ScheduleInterleavedZeroBubble", stages=2),
    "zero_bubble_v": Schedule("ScheduleZBVZeroBubble", stages=2, folded=True),
    "gpipe_reentrant": Schedule("ScheduleGPipe", checkpointed=CheckpointImpl.REENTRANT),
    "one_f_one_b_non_reentrant": Schedule("Schedule1F1B", checkpointed=CheckpointImpl.NO_REENTRANT),
    "interleaved_reentrant": Schedule(
        "ScheduleInterleaved1F1B", stages=2, checkpointed=CheckpointImpl.REENTRANT
    ),
    "zero_bubble_non_reentrant": Schedule(
        "ScheduleInterleavedZeroBubble", stages=2, checkpointed=CheckpointImpl.NO_REENTRANT
    ),
}


def numbers_of(schedule: Schedule, rank: int, world: int) -> list[int]:
    """The stages of a rank."""
    last = schedule.stages * world - 1
    return [rank, last - rank] if schedule.folded else list(range(rank, last + 1, world))


def shapes(part: Stage, schedule: Schedule) -> dict[str, torch.Tensor]:
    """Examples, where a stage cannot learn by itself: the trial asks for gradients in a way that the kind refuses."""
    if schedule.checkpointed is not CheckpointImpl.REENTRANT:
        return {}
    between = torch.zeros(ROWS, TOKENS, WIDTH, requires_grad=True)
    first, last = part.embed is not None, part.head is not None
    return {
        "input_args": batch(0, 0)[0] if first else between,
        "output_args": torch.zeros(ROWS, TOKENS, WORDS, requires_grad=True) if last else between,
    }


def train(name: str, rank: int, world: int, *, watched: bool) -> list[str]:
    """A few steps; returns losses, where this rank has them, and a digest of the parameters."""
    schedule, count = SCHEDULES[name], SCHEDULES[name].stages * world
    torch.manual_seed(0)
    parts = [Stage(number, count) for number in range(count)]
    mine = [parts[number] for number in numbers_of(schedule, rank, world)]
    for part in mine if schedule.checkpointed else ():
        checkpointed(part, schedule.checkpointed)
    handles = []
    for part in mine if watched else ():
        part.case = name
        tensors = {*LINEAR.tensors, *ATTENTION.tensors}
        handles.append(
            capd_client.watch(part, name=f"{name}.stage{part.number}", steps="all", tensors=tensors)
        )
    if schedule.compiled:
        for part in mine:
            part.compile(backend="aot_eager")
    stages = [
        PipelineStage(part, part.number, count, torch.device("cpu"), **shapes(part, schedule))
        for part in mine
    ]
    run: Any = getattr(schedules, schedule.kind)(
        stages[0] if schedule.stages == 1 else stages, n_microbatches=CHUNKS, loss_fn=loss_of
    )
    parameters = [parameter for part in mine for parameter in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found: list[str] = []
    for step in range(STEPS):
        for turn in range(schedule.rounds):
            found += _schedule_step(run, step, turn, mine)
        optimizer.step()
        optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    return [*found, *(float(p.detach().double().sum()).hex() for p in parameters)]


def _schedule_step(run: Any, step: int, turn: int, mine: list[Stage]) -> list[str]:
    chunks = [batch(step, turn * CHUNKS + chunk) for chunk in range(CHUNKS)]
    words, targets = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    losses: list[torch.Tensor] = []
    given: dict[str, Any] = {}
    if any(part.head is not None for part in mine):
        given = {"target": targets, "losses": losses}
    run.step(*([words] if any(part.embed is not None for part in mine) else []), **given)
    return [loss.item().hex() for loss in losses]


def main(path: Path, names: list[str]) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    told = {}
    for name in names:
        plain = train(name, rank, world, watched=False)
        told[name] = train(name, rank, world, watched=True)
        assert plain == told[name], f"{name}: watching changed the results"
    path.with_suffix(f".{rank}").write_text(json.dumps(told))
    capd_client.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:] or [name for name, s in SCHEDULES.items() if not s.checkpointed])
