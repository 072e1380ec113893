"""How a job leaves its process group."""

from __future__ import annotations

import gc

import torch.distributed as dist

__all__ = ["leave_group"]


def leave_group() -> None:
    """Destroys the process group. The job's models must be gone by then.

    A DDP model that holds its group last may wait for ever (torch 2.13): it joins a thread of gloo with the GIL held,
    and the thread wants the GIL, to free the context that torch keeps with each collective of a backward.
    """
    gc.collect()
    dist.destroy_process_group()
