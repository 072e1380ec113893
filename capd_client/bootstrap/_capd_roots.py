"""The search for the models that a job trains, at their first training forward, if the job never calls `watch`.

A global forward pre-hook of torch sees every module that is called. The search looks for the first module that is in
training mode, with gradients enabled, outside of a backward, and has parameters to train. This is the module that
the training loop calls: DDP, FSDP, or the model itself. If a method of a larger model called it, the larger model is
watched, and calls of the part begin its micro-batches. Examples are a LightningModule's training_step and an agent's
act.

Some forwards do not count: a framework learns shapes by them, they are counted or traced, they warm up a CUDA graph,
or they initialise lazy modules.

The search ends when an optimizer steps for the second time, so that it finds all models that take turns. It also
ends with an explicit `watch`, and if the job itself imports capd_client, because such a job calls capd itself.

Found models are watched. Under CAPD_EMULATE they also compute in that format. The emulation is independent of
watching: it also happens under CAPD_WATCH=off, and in a job that has imported capd_client.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import _capd_calls
import torch
from _capd_compiled import Compiling
from _capd_notes import emulates, note, watches
from _capd_owners import name_of, owner_of, trains_others
from _capd_trials import during_forward, is_unreal, makes_graph, under_mode, uninitialized
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import get_worker_info
from torch.utils.hooks import RemovableHandle

__all__ = ["begin", "end", "searching"]

# The most calls of modules in training mode. It ends the search in a job whose optimizers never step as torch's do.
_MAX_CALLS = 200_000


class _Search:
    def __init__(self) -> None:
        self.running = False
        # Modules that are watched, or have nothing to watch.
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._handle: RemovableHandle | None = None
        self._pauses = 0
        self._calls = 0
        # Whether a training forward was seen. After it, capd_client is imported by us.
        self._seen = False
        # Whether the job had imported capd_client before.
        self._own = False
        # The names of the watched models.
        self._names: list[str] = []
        self._lock = threading.Lock()
        self._compiling = Compiling(self)

    def begin(self) -> None:
        """Hook into torch."""
        self.running = True
        _capd_calls.begin()
        self._compiling.begin()
        self._hook()
        # This hook is never removed. torch may be iterating over the hooks, and compiled optimizers guard them.
        register_optimizer_step_post_hook(_hook_of_optimizers(self))

    def end(self) -> None:
        """Leave torch as it was. May be called twice, and during one of our own calls."""
        self.running = False
        _capd_calls.end()
        self._compiling.end()
        self._unhook()

    def _hook(self) -> None:
        self._handle = register_module_forward_pre_hook(_hook_of_modules(self))

    def _unhook(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Run compiled code without our hooks, which would be traced and guarded."""
        self._pauses += 1
        self._unhook()
        try:
            yield
        finally:
            self._pauses -= 1
            if self.running and not self._pauses:
                self._hook()

    def called(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Handle a call of a module in training mode with gradients enabled."""
        self._calls += 1
        if self._calls > _MAX_CALLS:
            self.end()
        before = frozenset(module._forward_pre_hooks)
        if module in self._known:
            return None
        if uninitialized(module):
            during_forward(module, self.paused())
            return None
        if not self.look_at(module, args):
            return None
        return _run_hooks_after(module, before, args)

    def stepped(self, optimizer: Optimizer) -> None:
        """Handle a step of an optimizer. Steps before any forward only create the optimizer's state."""
        if not self._seen or not self.running:
            return
        if optimizer in self._stepped:
            self.end()
        self._stepped.add(optimizer)

    def look_at(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        """Watch `module` if it is a model that the job trains.

        Returns:
            Whether the module may have new hooks.
        """
        if not self._lock.acquire(blocking=False):
            # Another thread looks, or `watch` calls a module.
            return False
        try:
            return self._is_trained(module, args) and self._watch(module)
        except Exception as error:
            note(f"problem {_problem(error)}")
            self.end()
            raise
        finally:
            self._lock.release()

    def _is_trained(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        if module in self._known or not module.training or not torch.is_grad_enabled():
            return False
        if torch._C._current_graph_task_id() != -1 or torch.compiler.is_compiling():
            return False
        if torch._C._get_tracing_state() is not None or is_unreal(args):
            return False
        if under_mode() or _capd_calls.trying():
            return False
        parameter = next((p for p in module.parameters() if p.requires_grad), None)
        if parameter is None:
            # The module is a loss, or frozen.
            self._known.update(module.modules())
            return False
        # An emulation must be in place before the graph is recorded.
        return not is_unreal((parameter,)) and (emulates() or not makes_graph())

    def _watch(self, module: nn.Module) -> bool:
        if get_worker_info() is not None:
            self.end()
            return False
        if not self._seen:
            self._seen = True
            note("forward")
            self._own = "capd_client" in sys.modules
            if self._own:
                note("own")
        if self._own and not emulates():
            self.end()
            return False
        owner = owner_of(module)
        self._known.update(owner.modules())
        self._known.add(module)
        name = self._fresh_name(owner)
        if self._own or not watches():
            from capd_client.watching.automatic import emulate_found

            done = emulate_found(owner)
        else:
            from capd_client.watching.automatic import watch_found

            done = watch_found(owner, called=module, name=name)
        note(done)
        if done == "off":
            self.end()
        if done == "watched":
            self._names.append(name)
        return done != "off"

    def _fresh_name(self, module: nn.Module) -> str:
        """Return the name that distinguishes a model's keys from other models'. "" if it is the only known model."""
        stage = _capd_calls.stage_of(module)
        if stage is None and not self._names and not trains_others(module):
            return ""
        name = name_of(module) if stage is None else f"stage{stage}"
        taken = sum(used.partition("#")[0] == name for used in self._names)
        return f"{name}#{taken}" if taken else name


def _problem(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return (
            f"{sys.executable} has no {error.name}; install it: {sys.executable} -m pip install {error.name}"
        )
    return repr(error)


def _nothing(*_: Any) -> None:
    """Replace the hooks below in a trace, if a compiler meets one anyway."""


def _hook_of_modules(search: _Search) -> Any:
    def called(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not module.training or not torch.is_grad_enabled():
            return None
        try:
            return search.called(module, args)
        except Exception:
            # `look_at` has noted the error.
            return None

    called._torchdynamo_inline = _nothing  # type: ignore[attr-defined]
    return called


def _hook_of_optimizers(search: _Search) -> Any:
    def stepped(optimizer: Optimizer, *_: Any) -> None:
        search.stepped(optimizer)

    stepped._torchdynamo_inline = _nothing  # type: ignore[attr-defined]
    return stepped


def _run_hooks_after(
    module: nn.Module, before: frozenset[int], args: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """Run the hooks that `watch` has put on a module during its call. torch has already listed the module's hooks."""
    changed = False
    for number, hook in list(module._forward_pre_hooks.items()):
        if number in before:
            continue
        if number in module._forward_pre_hooks_with_kwargs:
            result = hook(module, args, {})
            args, changed = (args, changed) if result is None else (result[0], True)
        else:
            hook(module, args)
    return args if changed else None


_search = _Search()
begin, end = _search.begin, _search.end


def searching() -> bool:
    """Whether further models may be found."""
    return _search.running
