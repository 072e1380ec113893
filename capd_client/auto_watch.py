"""The watches that nobody asked for by name: of the models that `capd run` finds in a job that never calls `watch`.

An explicit `watch` ends them, at whatever time it comes: the job is captured exactly as it says.
"""

from __future__ import annotations

import sys

from torch import nn

from capd_client.api import session
from capd_client.attaching import WatchHandle, attach
from capd_client.integrations.megatron_schedule import models_under_way
from capd_client.watch_plan import WatchPlan

__all__ = ["give_way", "watch_found"]

_handles: list[WatchHandle] = []


def watch_found(model: nn.Module, *, called: nn.Module, name: str) -> str:
    """Watch `model`, which is about to train: the forwards of `called`, a part of it or itself, are its micro-batches.

    Where one of Megatron's schedules runs several chunks of it, they are one watch, with the names of the whole model.
    Returns "watched"; "empty" where there is nothing in it to capture, or nothing that is not captured already; "off"
    where nothing is captured in this process, or not without being asked (CAPD_WATCH=off).
    """
    sink = session()
    if sink is None or sink.config.watch == "off":
        return "off"
    handle = WatchHandle()
    try:
        chunks = models_under_way()
        one_of_several = len(chunks) > 1 and any(chunk is model for chunk in chunks)
        models, roots = (chunks, chunks) if one_of_several else ([model], [called])
        attach(sink, models, handle, WatchPlan(sink.config), name=name, roots=roots)
    except Exception as error:
        handle.remove()
        sink.drop_internal("watch", error)
        return "empty"
    if not handle.modules:
        return "empty"
    _handles.append(handle)
    return "watched"


def give_way() -> None:
    """The job calls `watch` itself: take away what is watched without its asking, and search no more."""
    roots = sys.modules.get("_capd_roots")
    if roots is not None:
        roots.end()
    while _handles:
        _handles.pop().remove()
