"""`emulate(model, recipe)`: a model's matrix products are computed in other number formats until `remove()`."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Optional

import torch
from torch import nn

from capd_client.config.recipe import Recipe
from capd_client.config.recipe import Words as Given
from capd_client.emulation.adapters import Adapter, adapter_of, reason_to_leave
from capd_client.emulation.plans import EmulationPlan, give, plan_of, take
from capd_client.emulation.quantise import quantise
from capd_client.emulation.words import words_of
from capd_client.errors import ConfigError
from capd_client.hooks import copies
from capd_client.hooks.module_names import place_modules
from capd_client.process.log import RateLimitedLog
from capd_client.process.patching import patch
from capd_client.protocol.selection import matches_any
from capd_client.tensors import emulation_label

__all__ = ["Emulation", "emulate"]

_Undo = Callable[[], None]
_lock = threading.RLock()
_notices = RateLimitedLog()


def emulate(
    model: nn.Module,
    recipe: Given,
    *,
    include: Optional[Iterable[str]] = None,
    exclude: Optional[Iterable[str]] = None,
    evaluation: bool = False,
) -> Emulation:
    """Have the linears and the attention of `model` compute with quantised operands, forward and backward.

    Call it before the first forward. It may come before or after wrapping, sharding, `torch.compile` and
    `watch(model)`. `watch` records the operands before they are quantised, and the emulated results. Parameters and
    the names in a state_dict do not change. Copies of the model, deep or pickled, are not emulated.

    Args:
        model: All its modules are searched for nn.Linear, subclasses of it that call F.linear,
            nn.MultiheadAttention, and modules that call F.scaled_dot_product_attention.
        recipe: A format for all products ("mxfp8"). Or a mapping from linear, qk, pv to formats with their options,
            or that mapping as JSON; see Recipe. A recipe that is none installs nothing.
        include: Globs over module names without wrappers ("layers.*.mlp.*"), instead of the recipe's. Default: all.
            A glob that matches no module that multiplies is logged.
        exclude: Globs of modules that are left alone ("lm_head"). It takes precedence over `include`.
        evaluation: Also emulate forwards without gradients in evaluation mode.

    Returns:
        The emulation, with `recipe`, `modules` (names), `left_alone` (reasons by name), and `remove()`.

    Raises:
        ConfigError: The recipe cannot be read, the globs leave no module, or a module is already emulated. In the
            last case, call `remove()` of that emulation first.
    """
    wanted = Recipe.of(recipe).within(include, exclude)
    plan = _plan(wanted, evaluation=evaluation)
    if wanted.is_none:
        return Emulation(wanted)
    with _lock:
        chosen, left = _chosen(model, wanted)
        for name, (module, _) in chosen.items():
            if copies.EMULATION in vars(module):
                raise ConfigError(
                    f"{name} is already emulated; remove() that emulation before another one begins"
                )
        emulation = Emulation(wanted, tuple(chosen), left)
        emulation._begin(model, list(chosen.values()), plan)
    if left:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(left.items())[:3])
        _notices.warn("left alone", "%d modules are not emulated (%s)", len(left), reasons)
    return emulation


class Emulation:
    """An active emulation. `remove()` ends it, and so does leaving it as a context manager.

    Attributes:
        recipe: The whole recipe.
        modules: The names of the modules that are emulated.
        left_alone: The reason for each module that the recipe names and that is not emulated.
    """

    def __init__(
        self,
        recipe: Recipe,
        modules: tuple[str, ...] = (),
        left_alone: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.recipe = recipe
        self.modules = modules
        self.left_alone = left_alone
        self._undo: list[_Undo] = []

    def remove(self) -> None:
        """Restore the modules. The last emulation of a process removes the patches. Further calls do nothing."""
        with _lock:
            while self._undo:
                self._undo.pop()()

    def __enter__(self) -> Emulation:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _begin(self, model: nn.Module, chosen: list[tuple[nn.Module, Adapter]], plan: EmulationPlan) -> None:
        if not chosen:
            return
        try:
            copies.install()
            self._undo.append(copies.uninstall)
            self._patch(chosen)
            for module, _ in chosen:
                give(module, plan)
                self._undo.append(functools.partial(take, module))
            self._undo.append(emulation_label.begin([model], self.recipe.text()))
            _forget_graphs()
        except BaseException:
            self.remove()
            raise

    def _patch(self, chosen: list[tuple[nn.Module, Adapter]]) -> None:
        for adapter in dict.fromkeys(adapter for _, adapter in chosen):
            self._undo.extend(adapter.patches() if adapter.patches else ())
        for holder, adapter in dict.fromkeys((_holder(type(module)), adapter) for module, adapter in chosen):
            self._undo.append(patch(holder, "forward", _forward_of(adapter), innermost=True))


def _forget_graphs() -> None:
    """Discard compiled code. torch assumes that the forward of a class stays as it was at compile time."""
    compiler: Any = sys.modules.get("torch._dynamo")
    if compiler is not None:
        compiler.reset_code_caches()


def _plan(recipe: Recipe, *, evaluation: bool) -> EmulationPlan:
    """Return the plan of a recipe's modules. At its end every format has quantised a tensor once."""
    words = {part: words_of(getattr(recipe, part)) for part in ("linear", "qk", "pv")}
    for word in {word for found in words.values() if found is not None for word in found.formats}:
        quantise(torch.zeros(2, 2), word, -1)
    return EmulationPlan(**words, exact=recipe.level == "exact", evaluation=evaluation)


def _chosen(model: nn.Module, recipe: Recipe) -> tuple[dict[str, tuple[nn.Module, Adapter]], dict[str, str]]:
    """Return the modules to emulate, and the reasons why others are left alone, by names without wrappers."""
    modules = dict(model.named_modules())
    places = place_modules(model, list(modules))
    chosen: dict[str, tuple[nn.Module, Adapter]] = {}
    left: dict[str, str] = {}
    known: list[str] = []
    multiplying: list[str] = []
    for qualified, module in modules.items():
        name = places[qualified].module
        adapter = adapter_of(module)
        reason = reason_to_leave(module, adapter, recipe.parts)
        if adapter is None and not reason:
            continue
        known.append(name)
        if adapter is not None and adapter.parts.isdisjoint(recipe.parts):
            continue
        multiplying.append(name)
        if (recipe.include and not matches_any(name, recipe.include)) or matches_any(name, recipe.exclude):
            continue
        if adapter is None or reason:
            left[name] = reason
        else:
            chosen[name] = module, adapter
    if multiplying and not chosen and not left:
        raise ConfigError(
            f"include {list(recipe.include)} and exclude {list(recipe.exclude)} leave none of {len(multiplying)} "
            f"modules to emulate, such as {multiplying[0]!r}"
        )
    _warn_of_globs_without_a_module(recipe, known)
    return chosen, left


def _warn_of_globs_without_a_module(recipe: Recipe, known: list[str]) -> None:
    """Warn of globs that match no module. Each is misspelt or names a container of modules.

    It is no error, because a recipe may be for all models of a job.
    """
    text = "%s %r matches none of the %d modules that multiply%s"
    example = f", such as {known[-1]!r}" if known else ""
    for option in ("include", "exclude"):
        for glob in getattr(recipe, option):
            if not any(matches_any(name, (glob,)) for name in known):
                _notices.warn(f"{option} {glob}", text, option, glob, len(known), example)


def _holder(kind: type[nn.Module]) -> type[Any]:
    """Return the class that defines the forward of a module."""
    return next(base for base in kind.__mro__ if "forward" in vars(base))


# An adapter always gets the same function, so that patches find their own.
@functools.cache
def _forward_of(adapter: Adapter) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            plan = plan_of(module)
            if plan is None:
                return original(module, *args, **kwargs)
            return adapter.forward(original, plan, module, *args, **kwargs)

        return forward

    return wrap
