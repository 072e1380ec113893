"""Watches the models that `capd run` finds when a job never calls `watch` itself.

An explicit `watch` ends the automatic watches at any time. The job is then captured exactly as its own calls say.
"""

from __future__ import annotations

import sys

from torch import nn

from capd_client.config.settings import load_config
from capd_client.config.watch_arguments import WatchPlan
from capd_client.emulation.from_settings import emulate_from_settings
from capd_client.integrations.counters.megatron import models_under_way
from capd_client.process.log import show
from capd_client.session.current import running, session
from capd_client.watching.attach import WatchHandle, attach

__all__ = ["emulate_found", "give_way", "watch_found"]

_handles: list[WatchHandle] = []


def watch_found(model: nn.Module, *, called: nn.Module, name: str) -> str:
    """Watch `model`, which is about to train.

    If a schedule of Megatron runs several chunks of the model, they form one watch with the names of the whole model.
    The emulation of CAPD_EMULATE is put on the model first. It stays for the whole job, even if nothing is captured.

    Args:
        model: The model.
        called: The model, or the part of it whose forwards begin the micro-batches.
        name: The prefix of the module names.

    Returns:
        "watched". "empty": the model has nothing to capture, or nothing that is not captured already. "off": nothing is
        captured in this process, or only on an explicit call (CAPD_WATCH=off).
    """
    sink = session()
    if sink is None:
        return "off"
    chunks = models_under_way()
    one_of_several = len(chunks) > 1 and any(chunk is model for chunk in chunks)
    models, roots = (chunks, chunks) if one_of_several else ([model], [called])
    emulate_from_settings(models, sink.config)
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
    """Put the emulation of CAPD_EMULATE on a model that is not watched.

    Returns:
        "empty". "off": capture is off, and so is emulation.
    """
    sink = running()
    config = load_config() if sink is None else sink.config
    if not config.enabled:
        return "off"
    if sink is None and config.log is not None:
        show(config.log)
    emulate_from_settings([model], config)
    return "empty"


def give_way() -> None:
    """Remove the automatic watches and stop the search, because the job calls `watch` itself."""
    roots = sys.modules.get("_capd_roots")
    if roots is not None:
        roots.end()
    while _handles:
        _handles.pop().remove()
