"""The names of a model's modules: the qualified name without wrappers, the layer and the stack.

Wrappers (torch.compile, FSDP, activation checkpointing, DDP, PEFT) add parts to qualified names that say nothing about
the model. These parts are removed, so a key is the same with every wrapper.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Optional

from torch import nn

from capd_client.protocol.key import Key
from capd_client.protocol.kinds import Kind, placement

__all__ = ["Place", "clean_name", "place_modules", "place_of"]

# The last one belongs to Lightning Fabric.
_WRAPPER_PARTS = frozenset(
    {
        "_orig_mod",
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
        "_forward_module",
    }
)
_PEFT = ["base_model", "model"]
_LAYER_IN_NAME = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block|resblocks)\.(\d+)(?=\.|$)")


class Place(NamedTuple):
    """The place of a module in its model.

    Attributes:
        module: The qualified name without wrappers.
        layer: The number of the layer, 0-based; None outside of a layer list.
        stack: The qualified name of the module that owns the layer list ("encoder", "vision_model.encoder"; "" for
            the root).
    """

    module: str
    layer: Optional[int]
    stack: str

    def of(self, suffix: str) -> Place:
        """Return the place of one of the module's several products."""
        return self._replace(module=_join(self.module, suffix)) if suffix else self

    def key(self, kind: Kind, tensor_name: str, quant_type: str, rank: int) -> Key:
        """Return the key of a tensor of a product at this place."""
        operation, phase = placement(tensor_name)
        return Key(
            quant_type=quant_type, rank=rank, tensor_name=tensor_name, layer=self.layer, phase=phase,
            layer_type=kind.layer_type, operation=operation, component=kind.component, module=self.module,
            stack=self.stack,
        )  # fmt: skip


def clean_name(qualified: str) -> str:
    """Remove wrapper parts from a qualified module name: `module._orig_mod.fc` becomes `fc`, `module` nothing."""
    parts = [part for part in qualified.split(".") if part not in _WRAPPER_PARTS]
    while parts[:1] == ["module"]:
        del parts[0]
    if parts[:2] == _PEFT:
        del parts[:2]
    return ".".join(parts)


def place_modules(model: nn.Module, qualified_names: list[str], *, prefix: str = "") -> dict[str, Place]:
    """Find the place of each named module of `model`.

    If two modules have the same name without wrapper parts, both keep their full names. A model that is itself a named
    module has an empty qualified name; its class names it. The layer list of a pipeline stage starts at 0 on every
    rank; its layers get the numbers that they have in the whole model.

    Args:
        model: The model.
        qualified_names: The names of modules, as `named_modules` returns them.
        prefix: The name given to `watch`. It precedes every module and stack name.

    Returns:
        The place of each module by its qualified name.
    """
    cleaned = {name: clean_name(_in_whole_model(model, name)) for name in qualified_names}
    uses = Counter(cleaned.values())
    places = {}
    for name in qualified_names:
        module = cleaned[name] if uses[cleaned[name]] == 1 else name
        layer, stack = _layer_and_stack(model, name)
        own_name = module or ("" if prefix else type(model).__name__)
        places[name] = Place(
            _join(prefix, own_name), layer, "" if layer is None else _join(prefix, clean_name(stack))
        )
    return places


def place_of(qualified: str) -> Place:
    """Return the place of a module whose name alone is known."""
    name = clean_name(qualified)
    return Place(name, *_layer_in_name(name))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _layer_and_stack(model: nn.Module, qualified: str) -> tuple[Optional[int], str]:
    """Return the layer number and the qualified name of the layer list's owner; (None, "") outside of a layer list."""
    path = qualified.split(".")
    for depth, (module, child) in enumerate(_path(model, path)):
        if path[depth].isdigit() and isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return _declared_layer(child, int(path[depth])), ".".join(path[: depth - 1])
    return _layer_in_name(clean_name(qualified))


def _path(model: nn.Module, names: list[str]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each pair of a module and its child on the way to a module of the model."""
    for name in names:
        child = model._modules.get(name)
        if child is None:
            return
        yield model, child
        model = child


def _layer_in_name(name: str) -> tuple[Optional[int], str]:
    match = _LAYER_IN_NAME.search(name)
    return (None, "") if match is None else (int(match[1]), name[: match.start()])


def _in_whole_model(model: nn.Module, qualified: str) -> str:
    """Return the name with the number that a pipeline stage's layer has in the whole model."""
    path = qualified.split(".")
    for depth, (module, child) in enumerate(_path(model, path)):
        if isinstance(module, nn.ModuleList) and _global_number(child) is not None:
            return ".".join((*path[:depth], str(_global_number(child)), *path[depth + 1 :]))
    return qualified


def _global_number(layer: nn.Module) -> Optional[int]:
    # Megatron's number is global and 1-based.
    number = getattr(layer, "layer_number", None)
    return number - 1 if type(number) is int and number >= 1 else None


def _declared_layer(layer: nn.Module, position: int) -> int:
    """Return the framework's number of the layer, or its position. The lists of pipeline stages all start at 0."""
    number = _global_number(layer)
    if number is not None:
        return number
    # The index of transformers is 0-based.
    index = getattr(layer, "layer_idx", None)
    return index if type(index) is int and index >= 0 else position
