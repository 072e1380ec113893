"""Which module a patched function runs for: the innermost one with owner hooks on this thread.

A function does not know its caller, and its product is captured under the module whose forward calls it. Such modules
get a pair of hooks that keep a stack per thread.
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
    """The module as an owner; all watches share it."""
    found = _owners.get(module)
    if found is None:
        found = _owners[module] = Owner(module)
    return found


def current_tap(role: str) -> Optional[Tap]:
    """The tap on the function `role` of the module whose forward this thread is in; None where nothing is captured."""
    stack = _local.stack
    owner = stack[-1] if stack else None
    return None if owner is None else owner.tap(role)


def is_owned() -> bool:
    """Whether this thread is in the forward of an owner, of a step that is captured."""
    stack = _local.stack
    return bool(stack) and stack[-1] is not None


def current_module() -> Optional[nn.Module]:
    """The module with taps on functions whose forward this thread is in, unless what runs is a product of it."""
    stack = _local.stack
    owner = stack[-1] if stack else None
    return None if owner is None else owner.module()


class Hidden:
    """Context manager: what runs inside is part of a product that is tapped already, and has no owner."""

    __slots__ = ()

    def __enter__(self) -> None:
        _local.stack.append(None)

    def __exit__(self, *_: object) -> None:
        _local.stack.pop()


class Owner:
    """A module whose forward calls patched functions, and the taps on them."""

    def __init__(self, module: nn.Module) -> None:
        self.module: weakref.ref[nn.Module] = weakref.ref(module)
        self.traced: tuple[tuple[str, Optional[Tensor], int], ...] = ()  # role, number, gradients of each
        self.gates: tuple[Gate, ...] = ()  # of the taps, each once
        self._taps: list[tuple[str, Tap]] = []
        self._handles: tuple[RemovableHandle, ...] = ()

    def add(self, role: str, tap: Tap) -> None:
        """Let calls of the function `role` in the module's forward be those of `tap`. The first puts the hooks on."""
        module = self.module()
        if not self._handles and module is not None:
            self._handles = (
                module.register_forward_pre_hook(_Enter(self)),
                module.register_forward_hook(_Leave(self), always_call=True),
            )
        self._changed([*self._taps, (role, tap)])

    def discard(self, tap: Tap) -> None:
        """Undo `add`; the last one takes the hooks off."""
        self._changed([(role, other) for role, other in self._taps if other is not tap])
        if not self._taps:
            for handle in self._handles:
                handle.remove()
            self._handles = ()

    def tap(self, role: str) -> Optional[Tap]:
        """The tap that captures calls of this function just now."""
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
    """Forward pre-hook of an owner."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def in_graph(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """What is compiled in its place."""
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
    """Forward hook of an owner; it also runs when the forward raises."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def in_graph(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """What is compiled in its place."""
        if module.training:
            trace_leave()

    @traced_as(in_graph)
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stack = _local.stack
        if stack and stack[-1] is self._owner:
            stack.pop()
