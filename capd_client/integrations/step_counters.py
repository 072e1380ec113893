"""Lets frameworks that count their steps tell capd's clock where they are (capd_client.stepping.begin_counted).

Each entry of `_PATCHES` wraps one method of a framework's class, the one around the forward of a micro-batch.
Iterations are the optimizer steps finished before, in every framework: the first is 0, and a resumed job goes on
where it left off. Patches sit on classes, hand everything through, and are taken off again by the last `uninstall`.

A framework may be imported, or found, when it trains already: whatever of it this thread is in counts from then on.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, Optional

from capd_client import optimizer_steps
from capd_client.context import Counter
from capd_client.integrations import megatron_schedule, pipelining
from capd_client.notices import Notices
from capd_client.signal_errors import is_interruption
from capd_client.stepping import begin_counted, counting, end_counted

__all__ = ["install", "look_again", "uninstall"]

_Method = Callable[..., Any]
_notices = Notices()


class _Patch(NamedTuple):
    """`wrap` makes, of the method of a class in a module, what stands in its place.

    owner: the class; "" for a function of the module. adopt: begins counting for the object whose method runs already.
    begun: the same where other functions run while it counts.
    """

    module: str
    owner: str
    method: str
    wrap: Callable[[_Method], _Method]
    adopt: Optional[Callable[[Any], None]] = None
    begun: Optional[Callable[[], None]] = None


class _Repeats:
    """How many micro-batches in a row an owner has begun at one iteration."""

    def __init__(self) -> None:
        self._at = (-1, -1)
        self._count = 0

    def next(self, owner: object, iteration: int) -> int:
        """0 for the first, 1 for the second, …"""
        at = (id(owner), iteration)
        self._count = self._count + 1 if at == self._at else 0
        self._at = at
        return self._count


def _around(counter_of: Callable[[Any], Optional[Counter]]) -> Callable[[_Method], _Method]:
    """While the method runs, the counter that `counter_of(self)` returns counts, if any."""

    def wrap(method: _Method) -> _Method:
        @functools.wraps(method)
        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _adopted:
                _end_adopted()
            counter = _unless_it_fails(counter_of, self) if _users else None
            if counter is None:
                return method(self, *args, **kwargs)
            with counting(counter):
                return method(self, *args, **kwargs)

        return counted

    return wrap


_adopted: list[Counter] = []  # of calls that had begun before they could be wrapped


def _adopting(counter_of: Callable[[Any], Optional[Counter]]) -> Callable[[Any], None]:
    """What `_around` does, from the middle of a call until the next one, or until an optimizer steps."""

    def adopt(owner: Any) -> None:
        counter = counter_of(owner)
        if counter is not None:
            if not _adopted:
                optimizer_steps.listen(_end_adopted)
            _adopted.append(counter)
            begin_counted(counter)

    return adopt


def _end_adopted() -> None:
    while _adopted:
        end_counted(_adopted.pop())
    optimizer_steps.forget(_end_adopted)


def _before(told: _Method) -> Callable[[_Method], _Method]:
    """`told` hears of every call, before the method runs."""

    def wrap(method: _Method) -> _Method:
        @functools.wraps(method)
        def telling(*args: Any, **kwargs: Any) -> Any:
            if _users:
                _unless_it_fails(told, *args, **kwargs)
            return method(*args, **kwargs)

        return telling

    return wrap


def _unless_it_fails(function: _Method, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:  # a version of the framework never seen
        if is_interruption(error):
            raise
        _notices.warn(
            "failed", "%s: forwards and steps are counted instead, for now: %r", function.__qualname__, error
        )
        return None


# -- Hugging Face Trainer: its callbacks, which also trainers with a training_step of their own call --------------


class _TrainerSteps:
    """The optimizer step that a transformers.Trainer is in."""

    def __init__(self) -> None:
        self._state: Any = None
        self._micro_batch = 0

    def __call__(self) -> tuple[int, int]:
        return self._state.global_step, self._micro_batch

    def begin(self, _handler: object, _args: object, state: Any, *_: Any, **__: Any) -> None:
        self._state, self._micro_batch = state, 0
        begin_counted(self)

    def adopt(self, trainer: Any) -> None:
        """`train` runs already, and its first forward as a rule."""
        self.begin(None, None, trainer.state)

    def go_on(self, _handler: object, _args: object, state: Any, *_: Any, **__: Any) -> None:
        if state is self._state:  # else it began before the patch
            self._micro_batch += 1
            begin_counted(self)

    def end(self, *_: Any, **__: Any) -> None:
        self._state = None
        end_counted(self)


_trainer_steps = _TrainerSteps()


def _train(method: _Method) -> _Method:
    """An error in the middle of a step ends the counting, too."""

    @functools.wraps(method)
    def train(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            _trainer_steps.end()

    return train


# -- Lightning -----------------------------------------------------------------------------------------------------


def _lightning_automatic(loop: Any) -> Counter:
    trainer = loop.trainer
    batch = trainer.fit_loop.epoch_loop.batch_idx
    return lambda: (trainer.global_step, batch % trainer.accumulate_grad_batches)


_manual_steps = _Repeats()


def _lightning_manual(loop: Any) -> Counter:
    """`global_step` counts the steps of all optimizers, so it moves on in the middle of a training_step."""
    trainer = loop.trainer
    begun = trainer.global_step
    micro_batch = _manual_steps.next(trainer, begun)
    return lambda: (trainer.global_step, micro_batch if trainer.global_step == begun else 0)


# -- DeepSpeed -----------------------------------------------------------------------------------------------------


def _deepspeed(engine: Any) -> Counter:
    """`micro_steps` tells the micro-batch where the engine itself decides which step() is a step."""
    managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
    own = (
        managed
        and getattr(engine, "_is_gradient_accumulation_boundary", None) is None
        and not hasattr(engine, "micro_batches")  # the pipeline engine: one step() for all of them
    )
    micro_batch = engine.micro_steps % engine.gradient_accumulation_steps() if own else None
    return lambda: (engine.global_steps, micro_batch)


# -- torchtitan: its steps begin with 1 ------------------------------------------------------------------------------


def _titan_step(trainer: Any) -> Counter:
    return lambda: (trainer.step - 1, None)


_titan_steps = _Repeats()


def _titan_micro_batch(trainer: Any) -> Optional[Counter]:
    if trainer.parallel_dims.pp_enabled:  # the micro-batches are the schedule's
        return None
    micro_batch = _titan_steps.next(trainer, trainer.step)
    return lambda: (trainer.step - 1, micro_batch)


def _counted(module: str, owner: str, method: str, counter_of: Callable[[Any], Optional[Counter]]) -> _Patch:
    return _Patch(module, owner, method, _around(counter_of), _adopting(counter_of))


_CALLBACKS = ("transformers.trainer_callback", "CallbackHandler")
_PATCHES = (
    _Patch(*_CALLBACKS, "on_step_begin", _before(_trainer_steps.begin)),
    _Patch(*_CALLBACKS, "on_substep_end", _before(_trainer_steps.go_on)),
    _Patch(*_CALLBACKS, "on_step_end", _before(_trainer_steps.end)),
    _Patch("transformers.trainer", "Trainer", "train", _train, _trainer_steps.adopt),
    *(
        _counted(f"{package}.loops.optimization.{module}", owner, method, counter_of)
        for package in ("lightning.pytorch", "pytorch_lightning")
        for module, owner, method, counter_of in (
            ("automatic", "_AutomaticOptimization", "_training_step", _lightning_automatic),
            ("manual", "_ManualOptimization", "advance", _lightning_manual),
        )
    ),
    _counted("deepspeed.runtime.engine", "DeepSpeedEngine", "forward", _deepspeed),
    *(_Patch(pipelining.MODULE, *wrap) for wrap in pipelining.WRAPS),
    *(
        _counted(module, "Trainer", method, counter_of)
        for module in ("torchtitan.trainer", "torchtitan.train")
        for method, counter_of in (("train_step", _titan_step), ("forward_backward_step", _titan_micro_batch))
    ),
    _Patch(megatron_schedule.MODULE, "", "check_first_val_step", _before(megatron_schedule.ask)),
    _Patch(
        megatron_schedule.MODULE, "", "set_current_microbatch", _before(megatron_schedule.begin),
        begun=megatron_schedule.adopt,
    ),
)  # fmt: skip


class _Installed(NamedTuple):
    owner: Any
    original: FunctionType
    wrapper: _Method


_lock = threading.RLock()  # re-entrant: a signal handler of the job may watch, too
_users = 0
_modules = 0  # of the process, when it was last looked for those of frameworks
_installed: dict[_Patch, _Installed] = {}


def install() -> None:
    """Patch the frameworks that this process has imported. Calls nest; see `uninstall`. Never raises."""
    global _users
    with _lock:
        _users += 1
        _patch_imported()


def look_again() -> None:
    """Patch what has been imported since. Asked in every forward of a root: as a rule nothing was. Never raises."""
    megatron_schedule.look()
    if len(sys.modules) != _modules:
        with _lock:
            if _users:
                _patch_imported()


def _patch_imported() -> None:
    global _modules
    _modules = len(sys.modules)
    fresh = [patch for patch in _PATCHES if patch not in _installed and _put_on(patch)]
    for patch in fresh:
        if patch.begun is not None:
            _unless_it_fails(patch.begun)
    if fresh:
        _unless_it_fails(_adopt, {_installed[patch].original.__code__: patch for patch in fresh})


def _put_on(patch: _Patch) -> bool:
    module = sys.modules.get(patch.module)
    owner = getattr(module, patch.owner, None) if patch.owner else module
    method = vars(owner).get(patch.method) if isinstance(owner, (type, ModuleType)) else None
    if not isinstance(method, FunctionType):
        return False
    wrapper = patch.wrap(method)
    setattr(owner, patch.method, wrapper)
    _installed[patch] = _Installed(owner, method, wrapper)
    return True


def _adopt(patches: dict[CodeType, _Patch]) -> None:
    """Let those count whose methods this thread is in, the outermost first."""
    found = []
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None:
        patch = patches.get(frame.f_code)
        if patch is not None and patch.adopt is not None:
            found.append((patch.adopt, frame.f_locals[frame.f_code.co_varnames[0]]))
        frame = frame.f_back
    for adopt, owner in reversed(found):
        adopt(owner)


def uninstall() -> None:
    """Undo one `install`; the last one puts the frameworks' own methods back.

    Where someone patched them after us, ours stay below theirs and pass everything through.
    """
    global _users
    with _lock:
        _users -= 1
        if _users:
            return
        _trainer_steps.end()
        megatron_schedule.end()
        _end_adopted()
        for patch, (owner, original, wrapper) in tuple(_installed.items()):
            if vars(owner).get(patch.method) is wrapper:
                setattr(owner, patch.method, original)
                del _installed[patch]
