"""How a method of a framework is wrapped so that a counter counts while it runs. Wrappers hand everything through."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

from capd_client import optimizer_steps
from capd_client.context import Counter
from capd_client.notices import Notices
from capd_client.signal_errors import is_interruption
from capd_client.stepping import begin_counted, counting, end_counted

__all__ = ["Method", "Patch", "before", "counted", "end_adopted", "listen", "unless_it_fails"]

Method = Callable[..., Any]
_notices = Notices()
_listening = False  # else wrappers that stay below somebody else's do nothing


class Patch(NamedTuple):
    """`wrap` makes, of the method of a class in a module, what stands in its place.

    owner: the class; "" for a function of the module. adopt: begins counting for the object whose method runs already.
    begun: the same where other functions run while it counts.
    """

    module: str
    owner: str
    method: str
    wrap: Callable[[Method], Method]
    adopt: Optional[Callable[[Any], None]] = None
    begun: Optional[Callable[[], None]] = None


def listen(listening: bool) -> None:
    """Whether anybody wants to know from now on."""
    global _listening
    _listening = listening


def _around(counter_of: Callable[[Any], Optional[Counter]]) -> Callable[[Method], Method]:
    """While the method runs, the counter that `counter_of(self)` returns counts, if any."""

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _adopted:
                end_adopted()
            counter = unless_it_fails(counter_of, self) if _listening else None
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
                optimizer_steps.listen(end_adopted)
            _adopted.append(counter)
            begin_counted(counter)

    return adopt


def end_adopted() -> None:
    while _adopted:
        end_counted(_adopted.pop())
    optimizer_steps.forget(end_adopted)


def before(told: Method) -> Callable[[Method], Method]:
    """`told` hears of every call, before the method runs."""

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def telling(*args: Any, **kwargs: Any) -> Any:
            if _listening:
                unless_it_fails(told, *args, **kwargs)
            return method(*args, **kwargs)

        return telling

    return wrap


def unless_it_fails(function: Method, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:  # a version of the framework never seen
        if is_interruption(error):
            raise
        _notices.warn(
            "failed", "%s: forwards and steps are counted instead, for now: %r", function.__qualname__, error
        )
        return None


def counted(module: str, owner: str, method: str, counter_of: Callable[[Any], Optional[Counter]]) -> Patch:
    """While the method runs, the counter that `counter_of(self)` returns counts, if any; one that runs already, too."""
    return Patch(module, owner, method, _around(counter_of), _adopting(counter_of))
