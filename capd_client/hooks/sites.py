"""Where in a model products can be tapped, as the integrations find them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional, Protocol

from torch import Tensor, nn

from capd_client.protocol.kinds import Kind

__all__ = [
    "Attributes",
    "QuantisedState",
    "Site",
    "TappedFunction",
    "operands_of",
    "output_of",
    "with_operands",
]

Attributes = tuple[tuple[str, Any], ...]


class QuantisedState(NamedTuple):
    """What a module keeps besides a quantised parameter to read it by: tensors by name, and JSON values."""

    tensors: dict[str, Tensor]
    attributes: dict[str, Any]


class TappedFunction(Protocol):
    """A function of a library whose calls are products. role: what an owner knows its taps by."""

    @property
    def role(self) -> str: ...

    def install(self, kind: Kind, tensors: frozenset[str]) -> None:
        """Patch the function for a tap on a product of this kind that captures these tensors."""

    def uninstall(self) -> None:
        """Undo one `install`."""


class Site(NamedTuple):
    """One product of one module.

    Either the module's own arguments are the operands, and `arguments` names them: they are the first of its forward,
    in the order of `kind.operands`. Or the product is a call of `function` somewhere in the module's forward.

    suffix: after the module's name, where a module holds several products.
    instead_of: suffixes of products of the module that run where this one does not, as a call decides.
    role: what the module's owner knows the tap by, where it has several on one function.
    parameter: the module's attribute that holds it, or what it is a part of, where it is not called as in the kind.
    attributes: what is constant about its tensors (layout, coordinates): JSON values that can be hashed.
    of_tensor: the same, for single tensors by their names.
    describe: given a call's args and kwargs, what its records say in their metadata.
    lacks: tensors that this product does not have, each with the reason.
    computed: the parameter is computed again for every call.
    state: what is captured with the parameter.
    """

    module: nn.Module
    kind: Kind
    arguments: tuple[str, ...] = ()
    function: Optional[TappedFunction] = None
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


def operands_of(
    arguments: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The values given for the first arguments of a call, by position or by name; None for those not given."""
    if len(args) >= len(arguments):
        return args[: len(arguments)]
    return tuple(
        args[place] if place < len(args) else kwargs.get(name) for place, name in enumerate(arguments)
    )


def with_operands(
    arguments: tuple[str, ...], operands: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with others in the place of its operands."""
    if len(args) >= len(operands):
        return (*operands, *args[len(operands) :]), kwargs
    named = zip(arguments[len(args) :], operands[len(args) :], strict=True)
    given = {name: value for name, value in named if name in kwargs}
    return (*operands[: len(args)], *args[len(operands) :]), {**kwargs, **given}


def output_of(result: Any) -> Any:
    """The product's output in what a module or function returns: the first of several."""
    return result[0] if isinstance(result, tuple) and result else result
