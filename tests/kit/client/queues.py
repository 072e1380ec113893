"""An in-flight queue without a session, and what tests ask of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from capd_client.arena.allocator import SlotAllocator
from capd_client.inflight.capture import Capture, Refused
from capd_client.inflight.counters import Counters
from capd_client.inflight.definitions import Definition
from capd_client.inflight.policies import Block, Drop
from capd_client.inflight.queue import Queue
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Descriptor

PAGE = 4096


def make(
    pages: int = 4,
    max_block_s: float = 0.0,
    step_nbytes: int | None = None,
    policy: Drop | None = None,
    wake: Callable[[], None] = lambda: None,
) -> tuple[Queue, Definition]:
    slots = SlotAllocator(PAGE, pages * PAGE)
    policy = policy or (Block(max_block_s) if max_block_s else Drop())
    queue = Queue(slots, Counters(), policy, step_nbytes=step_nbytes, wake=wake)
    key = Key(quant_type="bf16", rank=0, tensor_name="x")
    return queue, queue.definitions.make(key, torch.float32, None)


def admit(queue: Queue, definition: Definition, nbytes: int = PAGE, iteration: int = 0) -> Capture | None:
    descriptor = Descriptor(0, 0, nbytes, definition.id, (nbytes // 4,), Moment(iteration))
    capture = queue.admit(definition, descriptor)
    return None if isinstance(capture, Refused) else capture


def exact(queue: Queue) -> bool:
    now = queue.snapshot()
    return now.offered == now.committed + now.in_flight + sum(now.dropped.values())


def send_all(queue: Queue) -> list[int]:
    sequences: list[int] = []
    while batch := queue.next_batch(3):
        sequences += [capture.descriptor.sequence for capture in batch]
    return sequences
