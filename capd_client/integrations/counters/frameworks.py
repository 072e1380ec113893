"""Which methods of which frameworks tell where they are in training: those around the forward of a micro-batch.

Iterations are the optimizer steps finished before, in every framework: the first is 0, and a resumed job goes on
where it left off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Optional

from capd_client.integrations.counters import megatron, pipelining
from capd_client.integrations.counters.patches import Patch, counted
from capd_client.steps.clock import begin_counted, end_counted
from capd_client.steps.context import Counter

__all__ = ["PATCHES", "end"]


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

    def go_on(self, _handler: object, _args: object, state: Any, *_: Any, **__: Any) -> None:
        if state is self._state:  # else it began before the patch
            self._micro_batch += 1
            begin_counted(self)

    def end(self, *_: Any, **__: Any) -> None:
        self._state = None
        end_counted(self)


_trainer_steps = _TrainerSteps()


@contextmanager
def _training() -> Iterator[None]:
    """An error in the middle of a step ends the counting, too."""
    try:
        yield
    finally:
        _trainer_steps.end()


def _train(*_: Any, **__: Any) -> AbstractContextManager[None]:
    return _training()


def _train_on(trainer: Any, *_: Any, **__: Any) -> AbstractContextManager[None]:
    """`train` runs already, and its first forward as a rule."""
    _trainer_steps.begin(None, None, trainer.state)
    return _training()


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


_CALLBACKS = ("transformers.trainer_callback", "CallbackHandler")
PATCHES = (
    Patch(*_CALLBACKS, "on_step_begin", _trainer_steps.begin),
    Patch(*_CALLBACKS, "on_substep_end", _trainer_steps.go_on),
    Patch(*_CALLBACKS, "on_step_end", _trainer_steps.end),
    Patch("transformers.trainer", "Trainer", "train", _train, _train_on),
    *(
        counted(f"{package}.loops.optimization.{module}", owner, method, counter_of)
        for package in ("lightning.pytorch", "pytorch_lightning")
        for module, owner, method, counter_of in (
            ("automatic", "_AutomaticOptimization", "_training_step", _lightning_automatic),
            ("manual", "_ManualOptimization", "advance", _lightning_manual),
        )
    ),
    counted("deepspeed.runtime.engine", "DeepSpeedEngine", "forward", _deepspeed),
    *(Patch(pipelining.MODULE, owner, method, told, told) for owner, method, told in pipelining.TOLD),
    *(
        counted(module, "Trainer", method, counter_of)
        for module in ("torchtitan.trainer", "torchtitan.train")
        for method, counter_of in (("train_step", _titan_step), ("forward_backward_step", _titan_micro_batch))
    ),
    Patch(megatron.MODULE, "", "check_first_val_step", megatron.ask),
    Patch(
        megatron.MODULE, "", "set_current_microbatch", megatron.begin,
        begun=megatron.adopt,
    ),
)  # fmt: skip


def end() -> None:
    """Nobody listens any more: what has begun counts no longer."""
    _trainer_steps.end()
    megatron.end()
