"""Keeps what captures are called from having a graph compiled for each name.

What a compiled graph uses is its constant, guarded by a comparison: `capture(x, layer=self.index)` in 40 blocks that
are compiled one by one would make 40 graphs of one. From the ninth on torch gives up, or with `fullgraph=True` raises.
Numbers of modules therefore become inputs of the graph. Texts cannot, so a frame that was compiled anew for its texts
until half of torch's limit was used goes on without captures in its graph; the other half is the job's.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["breaks_are_errors", "can_free_numbers", "crowded", "forget_numbers", "lend_numbers", "note"]

_ENOUGH = 2  # sets of names: two may be a number that is a constant in the first graph and then an input
_OWN_INPUTS = ("dynamic_sources", "unbacked_sources", "_shapes_spec")  # settings by which a job names its own

_KEPT = "_capd_numbers"  # attribute of a graph under way: the inputs made for captures

_named: dict[int, dict[int, set[tuple[Any, ...]]]] = {}  # frame → its compilation → what was captured in it


def note(arguments: tuple[Any, ...]) -> None:
    """Remember what the capture that is being traced is called."""
    compiling = torch._guards.CompileContext.current_compile_id()
    if compiling is not None and compiling.frame_id is not None and compiling.frame_compile_id is not None:
        freed = (int, torch.SymInt) if torch._dynamo.config.automatic_dynamic_shapes else torch.SymInt
        names = tuple(None if isinstance(a, freed) else a for a in arguments)
        _named.setdefault(compiling.frame_id, {}).setdefault(compiling.frame_compile_id, set()).add(names)


def crowded() -> bool:
    """Whether the frame that is being traced was compiled too often already, with other names each time."""
    compiling = torch._guards.CompileContext.current_compile_id()
    if compiling is None or compiling.frame_id is None or compiling.frame_compile_id is None:
        return False
    if not compiling.frame_compile_id:
        _named.pop(compiling.frame_id, None)  # of a frame before torch.compiler.reset()
    if compiling.frame_compile_id < torch._dynamo.config.recompile_limit // 2:
        return False
    before = (
        names for at, names in _named.get(compiling.frame_id, {}).items() if at < compiling.frame_compile_id
    )
    return len(set(map(frozenset, before))) > _ENOUGH


def can_free_numbers() -> bool:
    """Whether numbers of modules can be inputs of the graph that is being traced, for captures alone."""
    output, config = getattr(_translator(), "output", None), torch._dynamo.config
    return (
        hasattr(torch._dynamo, "patch_dynamo_config")
        and hasattr(output, "variable_tracker_cache")
        and hasattr(output, "unspec_variable_map")
        and not config.allow_unspec_int_on_nn_module  # they are in any case
        and not any(getattr(config, name, None) for name in _OWN_INPUTS)
    )


def lend_numbers() -> None:
    """Let the next capture find the inputs that those before it made: torch wants one of each number."""
    output = _translator().output
    for known, ours in zip(_known(output), getattr(output, _KEPT, ()), strict=False):
        known.update(ours)


def forget_numbers() -> None:
    """Let the job find the numbers of its modules as it would without capd: as constants, where it uses them."""
    from torch._dynamo.variables.tensor import SymNodeVariable

    output = _translator().output
    taken = []
    for known in _known(output):
        ours = {
            place: variable
            for place, variable in known.items()
            if type(variable) is SymNodeVariable  # isinstance would have it look at what it has put off
            and _of_a_module(variable.source)
        }
        for place in ours:
            del known[place]
        taken.append(ours)
    setattr(output, _KEPT, taken)


def _known(output: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
    return output.variable_tracker_cache, output.unspec_variable_map


def breaks_are_errors() -> bool:
    """Whether the job wants one graph (`fullgraph=True`), so that nothing may break the one that is being traced."""
    translator = _translator()
    return any(getattr(translator, name, True) for name in ("one_graph", "error_on_graph_break"))


def _translator() -> Any:
    """What the compiler works with while it traces a frame."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    current: Any = getattr(InstructionTranslator, "current_tx", lambda: None)
    return current()


def _of_a_module(source: Any) -> bool:
    return source is not None and (
        source.guard_source.is_unspecialized_nn_module() or source.guard_source.is_specialized_nn_module()
    )
