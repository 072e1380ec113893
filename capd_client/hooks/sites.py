"""Sites: the products of a model that can be tapped, as the integrations find them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional, Protocol

from torch import Tensor, nn

from capd_client.protocol.kinds import Kind

__all__ = [
    "Attributes",
    "Patched",
    "QuantisedState",
    "Site",
    "operands_of",
    "output_of",
    "with_operands",
]

Attributes = tuple[tuple[str, Any], ...]


class QuantisedState(NamedTuple):
    """The tensors, by name, and the JSON values without which a quantised parameter cannot be read."""

    tensors: dict[str, Tensor]
    attributes: dict[str, Any]


class Patched(Protocol):
    """A function whose calls are products (`hooks/function_sites.py`)."""

    role: str

    def install(self, tensors: frozenset[str]) -> None:
        """Patch the function for one more tap, which captures these tensors."""

    def uninstall(self) -> None:
        """Undo one `install`."""


class Site(NamedTuple):
    """One product of one module: the module's own forward, or a call of `function` in its forward.

    Attributes:
        module: The module.
        kind: The kind of the product.
        arguments: Without `function`, the names of the operands. They are the first arguments of the forward, in the
            order of `kind.operands`.
        function: The function whose calls are the product (`capd_client.hooks.function_sites.FunctionSite`). None: the
            module's own forward.
        suffix: The text after the module's name in keys, if a module has several products.
        instead_of: The suffixes of the module's other products, if a call runs either this product or these.
        role: The name under which the owner keeps the tap, if it has several taps on one function.
        parameter: The attribute that holds the parameter, or a tensor that contains it. Default: `kind.parameter`.
        attributes: Constants of the tensors (layout, coordinates), as hashable JSON values.
        of_tensor: Constants of single tensors, by tensor name.
        describe: Returns the metadata of a call's records from its args and kwargs.
        lacks: The tensors that this product does not have, each with the reason.
        computed: Whether the parameter is computed again for every call.
        state: Returns the state that is captured with a quantised parameter.
        tied: Returns whether another module has the parameter, too. It is asked when its first gradient is captured.
    """

    module: nn.Module
    kind: Kind
    arguments: tuple[str, ...] = ()
    function: Optional[Patched] = None
    suffix: str = ""
    instead_of: tuple[str, ...] = ()
    role: str = ""
    parameter: str = ""
    attributes: Attributes = ()
    of_tensor: tuple[tuple[str, Attributes], ...] = ()
    describe: Optional[Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]] = None
    lacks: tuple[tuple[str, str], ...] = ()
    computed: bool = False
    state: Optional[Callable[[nn.Module], QuantisedState]] = None
    tied: Optional[Callable[[nn.Module], bool]] = None


def operands_of(
    arguments: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the values of a call's first arguments, by position or by name; None for a missing argument."""
    if len(args) >= len(arguments):
        return args[: len(arguments)]
    return tuple(
        args[place] if place < len(args) else kwargs.get(name) for place, name in enumerate(arguments)
    )


def with_operands(
    arguments: tuple[str, ...], operands: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with its operands replaced by `operands`."""
    if len(args) >= len(operands):
        return (*operands, *args[len(operands) :]), kwargs
    named = zip(arguments[len(args) :], operands[len(args) :], strict=True)
    given = {name: value for name, value in named if name in kwargs}
    return (*operands[: len(args)], *args[len(operands) :]), {**kwargs, **given}


def output_of(result: Any) -> Any:
    """Return the product's output from a result of a module or function: the first of several values."""
    return result[0] if isinstance(result, tuple) and result else result
