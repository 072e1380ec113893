"""Owners: modules whose forward calls patched functions.

A function does not know its caller, but its product is captured under the module whose forward calls it. A pair of
hooks on this module keeps a stack per thread. The owner of a call is the innermost module on the stack.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Optional

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from capd_client.graph.owners import trace_enter, trace_leave
from capd_client.graph.taps import gradients_of, graph_input
from capd_client.hooks.base import Hook
from capd_client.hooks.tap import Tap
from capd_client.process.dynamo import traced_as
from capd_client.steps.gate import Gate

__all__ = ["Hidden", "Owner", "current_module", "current_tap", "is_owned", "owner_of"]


class _OwnersOfThread(threading.local):
    def __init__(self) -> None:
        self.stack: list[Optional[Owner]] = []


_local = _OwnersOfThread()
_owners: weakref.WeakKeyDictionary[nn.Module, Owner] = weakref.WeakKeyDictionary()


def owner_of(module: nn.Module) -> Owner:
    """Return the owner object of a module. All watches share it."""
    found = _owners.get(module)
    if found is None:
        found = _owners[module] = Owner(module)
    return found


def current_tap(role: str) -> Optional[Tap]:
    """Return the current owner's tap on the function `role`; None if nothing is captured."""
    stack = _local.stack
    owner = stack[-1] if stack else None
    return None if owner is None else owner.tap(role)


def is_owned() -> bool:
    """Return whether this thread is in the forward of an owner, in a step that is captured."""
    stack = _local.stack
    return bool(stack) and stack[-1] is not None


def current_module() -> Optional[nn.Module]:
    """Return the module of the current owner; None inside one of its products, or outside of an owner's forward."""
    stack = _local.stack
    owner = stack[-1] if stack else None
    return None if owner is None else owner.module()


class Hidden:
    """A context that has no owner, because the code inside is part of a product that is already tapped."""

    __slots__ = ()

    def __enter__(self) -> None:
        _local.stack.append(None)

    def __exit__(self, *_: object) -> None:
        _local.stack.pop()


class Owner:
    """A module whose forward calls patched functions, and the taps on them."""

    def __init__(self, module: nn.Module) -> None:
        self.module: weakref.ref[nn.Module] = weakref.ref(module)
        # The role, the number and the gradients of each tap, as compiled graphs use them.
        self.traced: tuple[tuple[str, Optional[Tensor], int], ...] = ()
        # The gates of the taps, each once.
        self.gates: tuple[Gate, ...] = ()
        self._taps: list[tuple[str, Tap]] = []
        self._handles: tuple[RemovableHandle, ...] = ()

    def add(self, role: str, tap: Tap) -> None:
        """Let `tap` capture the module's calls of the function `role`. The first tap puts the hooks on."""
        module = self.module()
        if not self._handles and module is not None:
            self._handles = (
                module.register_forward_pre_hook(_Enter(self)),
                module.register_forward_hook(_Leave(self), always_call=True),
            )
        self._changed([*self._taps, (role, tap)])

    def discard(self, tap: Tap) -> None:
        """Undo `add`. The last tap removes the hooks."""
        self._changed([(role, other) for role, other in self._taps if other is not tap])
        if not self._taps:
            for handle in self._handles:
                handle.remove()
            self._handles = ()

    def tap(self, role: str) -> Optional[Tap]:
        """Return the tap that currently captures calls of this function; None if no tap does."""
        for of, tap in self._taps:
            if of == role and tap.tensors:
                return tap
        return None

    def _changed(self, taps: list[tuple[str, Tap]]) -> None:
        self._taps = taps
        self.gates = tuple(dict.fromkeys(tap.gate for _, tap in taps))
        self.traced = tuple(
            (role, graph_input(tap.number), gradients_of(tap.kind, tap.tensors))
            for role, tap in taps
            if tap.number >= 0
        )


class _Enter(Hook):
    """A forward pre-hook on an owner."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def in_graph(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Put the owner on the stack of the trace. The compiler traces this in place of the hook."""
        if module.training:
            trace_enter(self._owner.traced)

    @traced_as(in_graph)
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        owner = self._owner
        for gate in owner.gates:
            if gate.closed_at != gate.context.iteration:
                if module.training and not is_compiling() and owner.module() is module:
                    _local.stack.append(owner)
                return


class _Leave(Hook):
    """A forward hook on an owner. It also runs when the forward raises."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def in_graph(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Take the owner off the stack of the trace. The compiler traces this in place of the hook."""
        if module.training:
            trace_leave()

    @traced_as(in_graph)
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stack = _local.stack
        if stack and stack[-1] is self._owner:
            stack.pop()
