"""Library functions whose calls are products: they are patched while a watch needs them.

A call is captured by the tap of its owner, the module whose forward makes the call.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, Optional

from torch import Tensor

from capd_client.graph.owners import prepare, trace_begin, trace_end
from capd_client.graph.taps import claim, gradients_of, graph_input
from capd_client.hooks.calls import Call
from capd_client.hooks.owners import Hidden, current_tap, is_owned
from capd_client.hooks.sites import operands_of, output_of, with_operands
from capd_client.hooks.tap import Tap
from capd_client.process.dynamo import traced_as, untraced
from capd_client.process.patching import patch
from capd_client.protocol.kinds import Kind

__all__ = ["FunctionSite"]

_Function = Callable[..., Any]
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]
_lock = threading.RLock()


class FunctionSite:
    """A patched function, or several functions that do the same."""

    def __init__(
        self,
        role: str,
        kind: Kind,
        arguments: tuple[str, ...],
        places: Callable[[], Iterable[tuple[Any, str]]],
        *,
        skip: int = 0,
        asks: bool = True,
        replaced: Optional[Callable[[_Function], _Function]] = None,
        read: Optional[Callable[[_Args, _Kwargs], _Args]] = None,
        role_of: Optional[Callable[[_Args, _Kwargs], str]] = None,
        others: tuple[FunctionSite, ...] = (),
    ) -> None:
        """Describe the function; `install` patches it.

        Args:
            role: The name under which an owner keeps the function's taps.
            kind: The kind of the product.
            arguments: The names of the arguments that hold the kind's operands and its parameter, in this order.
            places: Returns where callers find the function: objects and the names of their attributes.
            skip: The number of arguments before `arguments`.
            asks: Whether compiled graphs look up the owner when they run, if it was unknown when they were traced.
                A function that is called everywhere sets it to False.
            replaced: Returns the replacement of a function that `places` names. Default: `tapped`.
            read: Returns the operands of a call, then its parameter or None. Default: the values of `arguments`.
            role_of: Returns the role of a call, if an owner has several taps on the function. A call of a role without
                a tap is not captured.
            others: Functions that are patched together with this one.
        """
        self.role = role
        self._kind = kind
        self._arguments = arguments
        self._places = places
        self._skip = skip
        self._asks = asks
        self._replaced = replaced or self.tapped
        self._read = read or self._values
        self._role_of = role_of
        self._others = others
        self._users = 0
        self._undo: list[Callable[[], None]] = []
        # Graphs that do not know the owner of a call pass this number.
        self._asked: Optional[Tensor] = None
        # The gradients that any tap wants, as bits. The same graphs put hooks on them.
        self._gradients = 0

    def install(self, tensors: frozenset[str]) -> None:
        """Patch the function for one more tap, which captures these tensors. Calls nest; see `uninstall`."""
        with _lock:
            self._users += 1
            self._gradients |= gradients_of(self._kind, tensors)
            if self._users == 1:
                if self._asked is None:
                    self._asked = graph_input(claim(self))
                    prepare()
                self._undo = [patch(*place, self._replaced) for place in self._places()]
            for other in self._others:
                other.install(tensors)

    def uninstall(self) -> None:
        """Undo one `install`. The last call restores the function, unless another library has patched it since."""
        with _lock:
            for other in self._others:
                other.uninstall()
            self._users -= 1
            if not self._users:
                for undo in self._undo:
                    undo()
                self._undo, self._gradients = [], 0

    def current(self) -> Optional[Tap]:
        """Return the tap of calls on this thread. None if no call is captured, or if the tap depends on arguments."""
        return current_tap(self.role)

    def tapped(self, function: _Function) -> _Function:
        """Return `function` with taps on its calls."""
        role, role_of = self.role, self._role_of

        def in_graph(*args: Any, **kwargs: Any) -> Any:
            if self._asked is None:
                return function(*args, **kwargs)
            *given, parameter = self._read(args, kwargs)
            asked = self._asked if self._asks else None
            of = role if role_of is None else role_of(args, kwargs)
            operands = trace_begin(of, asked, self._gradients, *given)
            args, kwargs = self._with(operands, args, kwargs)
            result = function(*args, **kwargs)
            trace_end(*operands, parameter, output_of(result))
            return result

        @traced_as(in_graph, calls_the_job=True)
        @functools.wraps(function)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            of = role_of(args, kwargs) if role_of is not None and is_owned() else role
            tap = current_tap(of)
            if tap is None:
                return function(*args, **kwargs)
            call, args, kwargs = self._begin(tap, args, kwargs)
            with Hidden():
                result = function(*args, **kwargs)
            if call is not None:
                _end(tap, call, result)
            return result

        return tapped

    @untraced
    def _begin(self, tap: Tap, args: _Args, kwargs: _Kwargs) -> tuple[Optional[Call], _Args, _Kwargs]:
        try:
            module = tap.module()
            *operands, parameter = self._read(args, kwargs)
            call = None if module is None else tap.begin(module, operands, parameter, args, kwargs)
            if call is None:
                return None, args, kwargs
            aliases = tap.aliases(call, tuple(operands))
            return (call, args, kwargs) if aliases is None else (call, *self._with(aliases, args, kwargs))
        except Exception as error:
            tap.failed(f"{self.role} call", error)
            return None, args, kwargs

    def _values(self, args: _Args, kwargs: _Kwargs) -> _Args:
        given = operands_of(self._arguments, args[self._skip :], kwargs)
        return given if self._kind.parameter else (*given, None)

    def _with(self, operands: _Args, args: _Args, kwargs: _Kwargs) -> tuple[_Args, _Kwargs]:
        """Return the arguments of a call with its operands replaced. Operands that `read` computes stay."""
        names = self._arguments[: len(operands)]
        rest, kwargs = with_operands(names, operands[: len(names)], args[self._skip :], kwargs)
        return (*args[: self._skip], *rest), kwargs


@untraced
def _end(tap: Tap, call: Call, result: Any) -> None:
    try:
        tap.end(call, result)
    except Exception as error:
        tap.failed("call", error)
