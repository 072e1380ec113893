"""The emulation that CAPD_EMULATE requests, on every model that is found or watched, until the job ends.

A job that quantises by itself is never quantised twice. If a quantiser is known
(`capd_client.emulation.job_quantisers`), nothing is emulated. If one is found later, the emulations are removed.
`capd run` receives a note of each case.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

from torch import nn

from capd_client.config.settings import ClientConfig
from capd_client.emulation.job_quantisers import own_quantiser
from capd_client.process.log import RateLimitedLog
from capd_client.tensors import emulation_label

if TYPE_CHECKING:
    from capd_client.emulation.emulation import Emulation

__all__ = ["emulate_from_settings", "job_quantises"]


_notices = RateLimitedLog()
_active: list[Emulation] = []
# The job's own quantiser, once it is known.
_own: Optional[str] = None
# Whether the log says that nothing is emulated.
_said = False


def emulate_from_settings(models: Union[nn.Module, Iterable[nn.Module]], config: ClientConfig) -> None:
    """Emulate the recipe of `config` in the models that are not yet emulated. Raises only under CAPD_STRICT=1.

    Nothing happens without a recipe and under `capd plan`. Models in which the job emulates something itself are
    left alone.
    """
    if config.emulate is None or config.plan is not None:
        return
    try:
        fresh = _fresh([models] if isinstance(models, nn.Module) else list(models))
        reason = (_own or own_quantiser(fresh)) if fresh else None
        if reason is None:
            _emulate(fresh, config.emulate)
        else:
            job_quantises(reason)
            _leave_alone(reason)
    except Exception as error:
        name = type(error).__name__
        _note(f"unemulated {name}: {error}")
        _notices.warn("emulate", "the emulation failed: %s: %s; the job computes without it", name, error)
        if config.strict:
            raise


def _fresh(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the models in which nothing is emulated."""
    active = {model: {emulation_label.text_of(module) for module in model.modules()} for model in models}
    for text in set[str]().union(*active.values()) - {emulation_label.NONE}:
        # The note is also for emulations by the job itself.
        _note(f"emulated {text}")
    return [model for model, texts in active.items() if texts == {emulation_label.NONE}]


def _emulate(models: Sequence[nn.Module], text: str) -> None:
    from capd_client.emulation.emulation import emulate

    for model in models:
        emulation = emulate(model, text)
        _active.append(emulation)
        count = len(emulation.modules)
        _notices.info("emulating %s in %d modules of %s", text, count, type(model).__name__)
        _note(
            f"emulated {text}"
            if count
            else f"unemulated {type(model).__name__} has no product that is emulated"
        )


def _leave_alone(reason: str) -> None:
    global _said
    if not _said:
        _said = True
        _notices.info("the job %s, so nothing is emulated: quant_type is a label", reason)
        _note(f"label-only {reason}")


def job_quantises(reason: str) -> None:
    """Remove the emulations, with a warning, because the job quantises by itself.

    No more models are emulated after it.

    Args:
        reason: The quantiser, in words that follow "the job".
    """
    global _own
    if _own is None:
        _own = reason
    if not _active:
        return
    while _active:
        _active.pop().remove()
    _notices.warn(
        "own quantiser",
        "the job %s: the emulation of its models is removed, and their results until now were emulated; run it with "
        "--label-only (CAPD_EMULATE=none)",
        reason,
    )
    _note(f"removed {reason}")


def _note(what: str) -> None:
    """Add a note for `capd run`, if this process runs under it."""
    notes: Any = sys.modules.get("_capd_notes")
    if notes is not None:
        notes.note(what)
