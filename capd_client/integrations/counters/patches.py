"""What is put around methods of frameworks, so that counters count while they run. Wrappers hand everything through."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Optional

from capd_client.process.log import Notices
from capd_client.process.signals import is_interruption
from capd_client.steps import optimizer_steps
from capd_client.steps.clock import counting
from capd_client.steps.context import Counter

__all__ = [
    "Around", "Method", "Patch", "adopt", "counted", "end_adopted", "enter", "listen", "unless_it_fails", "wrapped",
]  # fmt: skip

Method = Callable[..., Any]
Around = Callable[..., Optional[AbstractContextManager[Any]]]
_notices = Notices()
_listening = False  # else wrappers that stay below somebody else's do nothing


class Patch(NamedTuple):
    """A method of a class in a module, and what it tells.

    owner: the class; "" for a function of the module. around: called with the arguments of a call, before the method
    runs; what it returns, if anything, holds while the method runs. adopt: the same for a call that had begun before
    anybody listened. begun: begins the micro-batch that is under way where other functions run while it counts.
    """

    module: str
    owner: str
    method: str
    around: Around
    adopt: Optional[Around] = None
    begun: Optional[Callable[[], None]] = None


def listen(listening: bool) -> None:
    """Whether anybody wants to know from now on."""
    global _listening
    _listening = listening


def wrapped(patch: Patch, method: Method) -> Method:
    """What stands in the place of `method`."""
    around = patch.around

    @functools.wraps(method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if _adopted:
            end_adopted(patch)
        held = unless_it_fails(around, *args, **kwargs) if _listening else None
        if held is None:
            return method(*args, **kwargs)
        with held:
            return method(*args, **kwargs)

    return counted


def enter(patch: Patch, *args: Any, **kwargs: Any) -> Optional[Callable[[], None]]:
    """Begin what holds during a call that is under way already; returns what ends it, None: nothing does."""
    held = None if patch.adopt is None else unless_it_fails(patch.adopt, *args, **kwargs)
    if held is None:
        return None
    held.__enter__()
    return functools.partial(held.__exit__, None, None, None)


_adopted: list[
    tuple[Patch, Callable[[], None]]
] = []  # calls whose end nobody sees, and what ends them for us


def adopt(patch: Patch, *args: Any) -> None:
    """The same where nothing tells of the call's end: until the next one, or until an optimizer steps."""
    ended = enter(patch, *args)
    if ended is not None:
        if not _adopted:
            optimizer_steps.listen(end_adopted)
        _adopted.append((patch, ended))


def end_adopted(of: Optional[Patch] = None) -> None:
    """End what was adopted, by one patch or by all."""
    for one in [one for one in _adopted if of is None or one[0] is of]:
        _adopted.remove(one)
        one[1]()
    if not _adopted:
        optimizer_steps.forget(end_adopted)


def unless_it_fails(function: Method, *args: Any, **kwargs: Any) -> Any:
    """What `function` returns; None where it raises, which is said."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # a version of the framework never seen
        if is_interruption(error):
            raise
        name = getattr(function, "__qualname__", function)
        _notices.warn("failed", "%s: forwards and steps are counted instead, for now: %r", name, error)
        return None


def counted(module: str, owner: str, method: str, counter_of: Callable[[Any], Optional[Counter]]) -> Patch:
    """While the method runs, the counter that `counter_of(self)` returns counts, if any; one that runs already, too."""

    @functools.wraps(counter_of)
    def around(this: Any, *_: Any, **__: Any) -> Optional[AbstractContextManager[Any]]:
        counter = counter_of(this)
        return None if counter is None else counting(counter)

    return Patch(module, owner, method, around, around)
