"""The framework calls that are in progress and know the training step, followed from their start.

A model is found in its first forward, inside the calls that its framework makes around it. A patch that is put on a
method at that time misses this call. It also misses all calls through a bound method that the job kept. So each
method is followed from the import of its module on. Once a model is watched, capd_client (`integrations.counters`)
counts here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

from _capd_after_import import after_import, wait_no_more

__all__ = [
    "METHODS", "TRIALS", "FollowedCall", "FollowedMethod", "begin", "end", "places", "stage_of", "trying", "under_way",
]  # fmt: skip

_PIPELINING = "torch.distributed.pipelining.stage"

TRIALS = (
    (_PIPELINING, "PipelineStage", "_prepare_forward_infra"),
    (_PIPELINING, "PipelineStage", "_prepare_backward_infra"),
    (_PIPELINING, "_PipelineStage", "_prepare_forward_infra"),
)
"""Module, class and method of trials: they run a model to learn shapes, and train nothing."""

METHODS = (
    *TRIALS,
    (_PIPELINING, "_PipelineStageBase", "forward_one_chunk"),
    (_PIPELINING, "_PipelineStageBase", "backward_weight_one_chunk"),
    (_PIPELINING, "_PipelineStageBase", "backward_maybe_with_nosync"),
    ("transformers.trainer", "Trainer", "train"),
    *(
        (f"{package}.loops.optimization.{module}", owner, method)
        for package in ("lightning.pytorch", "pytorch_lightning")
        for module, owner, method in (
            ("automatic", "_AutomaticOptimization", "_training_step"),
            ("manual", "_ManualOptimization", "advance"),
        )
    ),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "forward"),
    *(
        (module, "Trainer", method)
        for module in ("torchtitan.trainer", "torchtitan.train")
        for method in ("train_step", "forward_backward_step")
    ),
)  # fmt: skip
"""Module, class and method of all followed methods."""


class FollowedMethod:
    """A followed method. `counted` replaces it while capd_client counts, and takes the same arguments."""

    __slots__ = ("counted", "method", "trial")

    def __init__(self, method: Callable[..., Any], *, trial: bool) -> None:
        self.method = method
        self.trial = trial
        self.counted: Callable[..., Any] | None = None


class FollowedCall:
    """A call of a followed method.

    `known`: capd_client counts it. `ended`: functions to call at its end; they never raise. `returned`: its result,
    if it did not fail.
    """

    __slots__ = ("args", "ended", "known", "kwargs", "place", "returned", "thread")

    def __init__(self, place: FollowedMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.place = place
        self.args = args
        self.kwargs = kwargs
        self.thread = get_ident()
        self.known = place.counted is not None
        self.ended: list[Callable[[], None]] = []
        self.returned: tuple[Any, ...] = ()


places: dict[tuple[str, str, str], FollowedMethod] = {}
_calls: list[FollowedCall] = []


def begin() -> None:
    """Follow the methods of each framework from its import on."""
    for module in dict.fromkeys(module for module, _, _ in METHODS):
        after_import(module, functools.partial(_follow, module))


def end() -> None:
    """Wait for no more imports. Followed methods stay followed, because the job may have kept them."""
    wait_no_more([module for module, _, _ in METHODS])


def under_way() -> list[FollowedCall]:
    """Return the calls that this thread is in, the outermost first."""
    thread = get_ident()
    return [call for call in tuple(_calls) if call.thread == thread]


def trying() -> bool:
    """Whether this thread is in a framework's trial."""
    return any(call.place.trial for call in under_way())


def stage_of(model: object) -> int | None:
    """Return the number of the pipeline's stage that runs `model` now."""
    for call in under_way():
        number = getattr(call.args[0], "stage_index", None) if call.args else None
        if type(number) is int and getattr(call.args[0], "submod", None) is model:
            return number
    return None


def _follow(module: str) -> None:
    for place in METHODS:
        owner = getattr(sys.modules.get(module), place[1], None) if place[0] == module else None
        method = vars(owner).get(place[2]) if isinstance(owner, type) else None
        if callable(method) and place not in places:
            places[place] = FollowedMethod(method, trial=place in TRIALS)
            setattr(owner, place[2], _followed(places[place], method))


def _followed(place: FollowedMethod, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def followed(*args: Any, **kwargs: Any) -> Any:
        call = FollowedCall(place, args, kwargs)
        _calls.append(call)
        try:
            result = (place.counted or method)(*args, **kwargs)
            call.returned = (result,)
            return result
        finally:
            _calls.remove(call)
            # They hold the call, which would keep its batch and its loss until the garbage collector runs.
            ended, call.ended = call.ended, []
            for one in ended:
                one()

    return followed
