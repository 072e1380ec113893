"""Patches functions of libraries: several users at once, and undone in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["patch"]

_Function = Callable[..., Any]
_Wrap = Callable[[_Function], _Function]


class _Place:
    """An attribute of a module or class: its original function, and its current wrappers."""

    def __init__(self, holder: Any, name: str) -> None:
        self._holder = holder
        self._name = name
        # None if the attribute is inherited.
        self._raw = vars(holder).get(name)
        self._original: _Function = getattr(holder, name)
        self._ours = self._original
        # The users of each wrapper, the innermost first.
        self._wraps: dict[_Wrap, int] = {}

    def add(self, wrap: _Wrap, *, innermost: bool) -> None:
        if wrap in self._wraps:
            self._wraps[wrap] += 1
        elif innermost and self._is_ours():
            self._wraps = {wrap: 1, **self._wraps}
            self._set(self._wrapped())
        else:
            self._wraps[wrap] = 1
            self._set(wrap(getattr(self._holder, self._name)))

    def discard(self, wrap: _Wrap) -> bool:
        """Remove a wrapper; return whether none is left.

        If the job has patched the attribute after us, that stays: our functions are below it and pass calls on.
        """
        self._wraps[wrap] -= 1
        if not self._wraps[wrap]:
            del self._wraps[wrap]
            if self._is_ours():
                self._set(self._wrapped())
        return not self._wraps

    def _is_ours(self) -> bool:
        return bool(getattr(self._holder, self._name) is self._ours)

    def _wrapped(self) -> _Function:
        function = self._original
        for wrap in self._wraps:
            function = wrap(function)
        return function

    def _set(self, function: _Function) -> None:
        self._ours = function
        if function is self._original and self._raw is None:
            delattr(self._holder, self._name)
        elif function is self._original:
            setattr(self._holder, self._name, self._raw)
        else:
            is_static = isinstance(self._raw, staticmethod)
            setattr(self._holder, self._name, staticmethod(function) if is_static else function)


# Re-entrant, because a signal handler of the job may watch.
_lock = threading.RLock()
_places: dict[tuple[int, str], _Place] = {}


def patch(holder: Any, name: str, wrap: _Wrap, *, innermost: bool = False) -> Callable[[], None]:
    """Replace the function that `holder` has under `name` by `wrap(function)`, once for all users of `wrap`.

    Args:
        holder: A module or class.
        name: The attribute's name.
        wrap: Takes the function and returns its replacement.
        innermost: Whether to go below the existing wrappers of capd, which then see the original arguments. If the job
            has patched the function after them, `wrap` goes on top of the job's patch instead.

    Returns:
        A function that undoes the replacement.
    """
    key = (id(holder), name)
    with _lock:
        place = _places.get(key)
        if place is None:
            place = _places[key] = _Place(holder, name)
        place.add(wrap, innermost=innermost)

    def undo() -> None:
        with _lock:
            if place.discard(wrap):
                _places.pop(key, None)

    return undo
