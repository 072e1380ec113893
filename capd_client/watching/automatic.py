"""Watches the models that `capd run` finds when a job never calls `watch` itself.

An explicit `watch` ends them, at whatever time it comes: the job is captured exactly as it says.
"""

from __future__ import annotations

import sys

from torch import nn

from capd_client.config.settings import load_config
from capd_client.config.watch_arguments import WatchPlan
from capd_client.emulation.from_settings import emulate_as_told
from capd_client.integrations.counters.megatron import models_under_way
from capd_client.process.log import show
from capd_client.session.current import running, session
from capd_client.watching.attach import WatchHandle, attach

__all__ = ["emulate_found", "give_way", "watch_found"]

_handles: list[WatchHandle] = []


def watch_found(model: nn.Module, *, called: nn.Module, name: str) -> str:
    """Watch `model`, which is about to train: the forwards of `called`, a part of it or itself, are its micro-batches.

    Where one of Megatron's schedules runs several chunks of it, they are one watch, with the names of the whole model.
    Returns "watched"; "empty" where there is nothing in it to capture, or nothing that is not captured already; "off"
    where nothing is captured in this process, or not without being asked (CAPD_WATCH=off). What CAPD_EMULATE asks for
    is put on the model first: it stays for the whole job, whatever is captured of it.
    """
    sink = session()
    if sink is None:
        return "off"
    chunks = models_under_way()
    one_of_several = len(chunks) > 1 and any(chunk is model for chunk in chunks)
    models, roots = (chunks, chunks) if one_of_several else ([model], [called])
    emulate_as_told(models, sink.config)
    if sink.config.watch == "off":
        return "empty" if sink.config.emulate else "off"
    handle = WatchHandle()
    try:
        attach(sink, models, handle, WatchPlan(sink.config), name=name, roots=roots)
    except Exception as error:
        handle.remove()
        sink.drop_internal("watch", error)
        return "empty"
    if not handle.modules:
        return "empty"
    _handles.append(handle)
    return "watched"


def emulate_found(model: nn.Module) -> str:
    """The same where `model` is not to be watched: "empty", or "off" where capture is off, and emulation with it."""
    sink = running()
    config = load_config() if sink is None else sink.config
    if not config.enabled:
        return "off"
    if sink is None and config.log is not None:
        show(config.log)
    emulate_as_told([model], config)
    return "empty"


def give_way() -> None:
    """The job calls `watch` itself: take away what is watched without its asking, and search no more."""
    roots = sys.modules.get("_capd_roots")
    if roots is not None:
        roots.end()
    while _handles:
        _handles.pop().remove()
