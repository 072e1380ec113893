"""The patches around methods of frameworks: counters count while the methods run. Wrappers pass everything through."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Optional

from capd_client.process.log import RateLimitedLog
from capd_client.process.signals import is_interruption
from capd_client.steps import optimizer_steps
from capd_client.steps.clock import counting
from capd_client.steps.context import Counter

__all__ = [
    "Around", "Method", "Patch", "adopt", "counted", "end_adopted", "enter", "listen", "unless_it_fails", "wrapped",
]  # fmt: skip

Method = Callable[..., Any]
Around = Callable[..., Optional[AbstractContextManager[Any]]]
_notices = RateLimitedLog()
# If False, wrappers that stay below somebody else's patch do nothing.
_listening = False


def _nothing(*_: Any, **__: Any) -> None:
    """Count nothing, for a method that only returns something of interest."""


class Patch(NamedTuple):
    """A method of a class in a module, and the counter that runs with it.

    Attributes:
        owner: The class; "" for a function of the module.
        around: Called with the arguments of a call before the method runs. Its context manager, if any, is held
            while the method runs.
        adopt: As `around`, for a call that had begun before anybody listened.
        begun: Begins the current micro-batch if the counter runs while other functions run.
        returned: Called with the result and the arguments of a call, before its context manager ends.
    """

    module: str
    owner: str
    method: str
    around: Around = _nothing
    adopt: Optional[Around] = None
    begun: Optional[Callable[[], None]] = None
    returned: Optional[Callable[..., None]] = None


def listen(listening: bool) -> None:
    """Set whether anybody wants to know the counters from now on."""
    global _listening
    _listening = listening


def wrapped(patch: Patch, method: Method) -> Method:
    """Return the function that replaces `method`."""
    around, returned = patch.around, patch.returned

    @functools.wraps(method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if _adopted:
            end_adopted(patch)
        if not _listening:
            return method(*args, **kwargs)
        with _Guarded(unless_it_fails(around, *args, **kwargs)):
            result = method(*args, **kwargs)
            if returned is not None:
                unless_it_fails(returned, result, *args, **kwargs)
            return result

    if returned is not None:
        # A compiled caller traces the method itself (`capd_client.process.dynamo.traced_as`).
        counted._torchdynamo_inline = method  # type: ignore[attr-defined]
    return counted


class _Guarded:
    """A context manager of ours around a call of the job, if there is one. None of its errors reaches the job."""

    __slots__ = ("_held",)

    def __init__(self, held: Optional[AbstractContextManager[Any]]) -> None:
        self._held = held

    def __enter__(self) -> None:
        if self._held is not None and not unless_it_fails(self._begin, self._held):
            self._held = None

    def _begin(self, held: AbstractContextManager[Any]) -> bool:
        held.__enter__()
        return True

    def __exit__(self, *error: Any) -> None:
        if self._held is not None:
            unless_it_fails(self._held.__exit__, *error)


def enter(patch: Patch, *args: Any, **kwargs: Any) -> Optional[Callable[[], None]]:
    """Begin to count a call that already runs.

    Returns:
        The function that ends the counting. None if there is nothing to end.
    """
    held = None if patch.adopt is None else unless_it_fails(patch.adopt, *args, **kwargs)
    if held is None:
        return None
    guarded = _Guarded(held)
    guarded.__enter__()
    return functools.partial(guarded.__exit__, None, None, None)


# Calls whose end nobody sees, each with the function that ends its counting.
_adopted: list[tuple[Patch, Callable[[], None]]] = []


def adopt(patch: Patch, *args: Any) -> None:
    """Begin to count a call whose end nothing reports. It counts until the next call or until an optimizer steps."""
    ended = enter(patch, *args)
    if ended is not None:
        if not _adopted:
            optimizer_steps.listen(end_adopted)
        _adopted.append((patch, ended))


def end_adopted(of: Optional[Patch] = None) -> None:
    """End the adopted calls of one patch, or of all."""
    for one in [one for one in _adopted if of is None or one[0] is of]:
        _adopted.remove(one)
        one[1]()
    if not _adopted:
        optimizer_steps.forget(end_adopted)


def unless_it_fails(function: Method, *args: Any, **kwargs: Any) -> Any:
    """Return the result of `function`. If it raises, log one warning and return None."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        # An unknown version of the framework may raise anything.
        if is_interruption(error):
            raise
        name = getattr(function, "__qualname__", function)
        _notices.warn("failed", "%s: forwards and steps are counted instead, for now: %r", name, error)
        return None


def counted(
    module: str,
    owner: str,
    method: str,
    counter_of: Callable[[Any], Optional[Counter]],
    returned: Optional[Callable[..., None]] = None,
) -> Patch:
    """Return a patch under which the counter of `counter_of(self)`, if any, counts while the method runs.

    Calls that already run count, too. `returned`: as in `Patch`.
    """

    @functools.wraps(counter_of)
    def around(this: Any, *_: Any, **__: Any) -> Optional[AbstractContextManager[Any]]:
        counter = counter_of(this)
        return None if counter is None else counting(counter)

    return Patch(module, owner, method, around, around, returned=returned)
