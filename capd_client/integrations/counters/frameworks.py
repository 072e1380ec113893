"""The table of patches: the methods of each framework that run around the forward of a micro-batch, or know a scalar.

In every framework the iteration is the number of optimizer steps that are finished. The first iteration is 0, and a
resumed job continues its count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Optional

from capd_client.integrations import framework_scalars as scalars
from capd_client.integrations.counters import megatron, pipelining
from capd_client.integrations.counters.patches import Patch, counted
from capd_client.steps.clock import begin_counted, end_counted
from capd_client.steps.context import Counter

__all__ = ["PATCHES", "end"]


class _Repeats:
    """The number of micro-batches in a row that an owner has begun at one iteration."""

    def __init__(self) -> None:
        self._at = (-1, -1)
        self._count = 0

    def next(self, owner: object, iteration: int) -> int:
        """Return 0 for the first micro-batch, 1 for the second, and so on."""
        at = (id(owner), iteration)
        self._count = self._count + 1 if at == self._at else 0
        self._at = at
        return self._count


# -- Hugging Face Trainer. Trainers with their own training_step call its callbacks, too. --------------------------


class _TrainerSteps:
    """The current optimizer step of a transformers.Trainer."""

    def __init__(self) -> None:
        self._state: Any = None
        self._micro_batch = 0

    def __call__(self) -> tuple[int, int]:
        return self._state.global_step, self._micro_batch

    def begin(self, _handler: object, _args: object, state: Any, *_: Any, **__: Any) -> None:
        self._state, self._micro_batch = state, 0
        begin_counted(self)

    def go_on(self, _handler: object, _args: object, state: Any, *_: Any, **__: Any) -> None:
        # A step that began before the patch has another state.
        if state is self._state:
            self._micro_batch += 1
            begin_counted(self)

    def end(self, *_: Any, **__: Any) -> None:
        self._state = None
        end_counted(self)


_trainer_steps = _TrainerSteps()


@contextmanager
def _training(*_: Any, **__: Any) -> Iterator[None]:
    """Stop counting when training ends, even by an error in the middle of a step."""
    try:
        yield
    finally:
        _trainer_steps.end()


def _train_on(trainer: Any, *_: Any, **__: Any) -> AbstractContextManager[None]:
    """Count a `train` that already runs. Usually its first forward runs already, too."""
    _trainer_steps.begin(None, None, trainer.state)
    return _training()


# -- Lightning -----------------------------------------------------------------------------------------------------


def _lightning_automatic(loop: Any) -> Counter:
    trainer = loop.trainer
    batch = trainer.fit_loop.epoch_loop.batch_idx
    return lambda: (trainer.global_step, batch % trainer.accumulate_grad_batches)


_manual_steps = _Repeats()


def _lightning_manual(loop: Any) -> Counter:
    """Count by `global_step`, which includes the steps of all optimizers.

    It can advance in the middle of a training_step.
    """
    trainer = loop.trainer
    begun = trainer.global_step
    micro_batch = _manual_steps.next(trainer, begun)
    return lambda: (trainer.global_step, micro_batch if trainer.global_step == begun else 0)


# -- DeepSpeed -----------------------------------------------------------------------------------------------------


def _deepspeed(engine: Any) -> Counter:
    """Count by the engine. `micro_steps` is the micro-batch only if the engine decides which step() is a step."""
    managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
    own = (
        managed
        and getattr(engine, "_is_gradient_accumulation_boundary", None) is None
        # The pipeline engine has one step() for all micro-batches.
        and not hasattr(engine, "micro_batches")
    )
    micro_batch = engine.micro_steps % engine.gradient_accumulation_steps() if own else None
    return lambda: (engine.global_steps, micro_batch)


# -- torchtitan. Its steps begin with 1. ------------------------------------------------------------------------------


def _titan_step(trainer: Any) -> Counter:
    return lambda: (trainer.step - 1, None)


_titan_steps = _Repeats()


def _titan_micro_batch(trainer: Any) -> Optional[Counter]:
    # The pipeline schedule counts the micro-batches.
    if trainer.parallel_dims.pp_enabled:
        return None
    micro_batch = _titan_steps.next(trainer, trainer.step)
    return lambda: (trainer.step - 1, micro_batch)


_CALLBACKS = ("transformers.trainer_callback", "CallbackHandler")
PATCHES = (
    Patch(*_CALLBACKS, "on_step_begin", _trainer_steps.begin),
    Patch(*_CALLBACKS, "on_substep_end", _trainer_steps.go_on),
    Patch(*_CALLBACKS, "on_step_end", _trainer_steps.end),
    Patch("transformers.trainer", "Trainer", "train", _training, _train_on),
    *(
        counted(f"{package}.loops.optimization.{module}", owner, method, counter_of, returned)
        for package in ("lightning.pytorch", "pytorch_lightning")
        for module, owner, method, counter_of, returned in (
            ("automatic", "_AutomaticOptimization", "_training_step", _lightning_automatic, scalars.lightning),
            ("manual", "_ManualOptimization", "advance", _lightning_manual, None),
        )
    ),
    counted("deepspeed.runtime.engine", "DeepSpeedEngine", "forward", _deepspeed),
    *(Patch(pipelining.MODULE, owner, method, around, around) for owner, method, around in pipelining.METHODS),
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
    Patch(*_CALLBACKS, "on_log", scalars.trainer),
    Patch(megatron.MODULE, "", "forward_step_calc_loss", megatron.losses),
    *(
        Patch(
            "megatron.core.optimizer.optimizer", owner, "step", scalars.computes_norm,
            returned=scalars.megatron_step,
        )
        for owner in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
    ),
    # `clip_grad_norm_` calls it. The job may hold or pickle `clip_grad_norm_` itself.
    Patch(
        "torch.nn.utils.clip_grad", "", "_clip_grads_with_norm_", scalars.computes_norm,
        returned=scalars.clipped,
    ),
    Patch(
        "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "clip_grad_norm_",
        scalars.computes_norm, returned=scalars.clipped_by_fsdp,
    ),
)  # fmt: skip


def end() -> None:
    """Stop all counters. Nobody listens any more."""
    _trainer_steps.end()
    megatron.end()
