"""`capd_client.plan(model)`: what `watch(model)` would capture, in the job or a notebook, without a daemon."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Optional, Union

from torch import Tensor, nn

from capd_client.config.settings import load_config
from capd_client.config.watch_arguments import Select
from capd_client.errors import ConfigError
from capd_client.planning.disk import disk_plan, disk_settings
from capd_client.planning.sink import PlanSink
from capd_client.planning.text import expected_lines, plan_lines
from capd_client.planning.whole import whole_plan
from capd_client.protocol.kinds import placement
from capd_client.steps.shared_rules import shared_rules_of
from capd_client.tensors.inspect import local_part
from capd_client.watching.attach import WatchHandle, attached

if TYPE_CHECKING:
    from typing import TypeGuard

__all__ = ["Plan", "plan"]


class Plan:
    """What a `watch` of the same arguments would capture. Prints as a table.

    Before a training step: modules, tensors and dtypes, the shapes of parameters, and how wide activations are. The
    steps that run under it, three at most, give shapes, records and bytes. A context manager; at its end, by
    `remove()`, or when nothing refers to the plan any more, every hook is taken off again; what was seen stays.
    """

    def __init__(self, sink: PlanSink, handle: WatchHandle) -> None:
        self._sink = sink
        self._handle = handle
        # Of `print(plan(model))` nothing stays on the model.
        weakref.finalize(self, handle.remove).atexit = False
        self._expected = [row for tap in handle.taps for row in _expected(tap, sink)]

    def __enter__(self) -> Plan:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Take every hook off again. May be called twice."""
        self._sink.stop_clock()
        self._sink.enabled = False
        self._handle.remove()

    def as_dict(self) -> dict[str, Any]:
        """As `capd plan --json` (docs/json.md), of this process; `expected`: what is known before a step has run.

        Measures the link, which takes some milliseconds, and on a GPU waits for it.
        """
        host, sink = socket.gethostname(), self._sink
        disk, problems = None, []
        try:
            disk = disk_plan(*disk_settings(os.environ))
        except (ConfigError, OSError) as error:
            problems = [f"the store's disk is not planned: {error}"]
        found = whole_plan([sink.seen("complete")], host=host, disk=disk, ended=True)
        return {**found, "warnings": [*found["warnings"], *problems], "expected": self._expected}

    def __str__(self) -> str:
        if not self._sink.iterations:
            return "\n".join(expected_lines(self._expected))
        return "\n".join(plan_lines(self.as_dict()))

    __repr__ = __str__


def plan(
    model: Union[nn.Module, Sequence[nn.Module]],
    *,
    name: Optional[str] = None,
    steps: Optional[str] = None,
    tensors: Optional[Iterable[str]] = None,
    select: Optional[Select] = None,
    slices: Union[str, Mapping[str, str], None] = None,
) -> Plan:
    """Say what `watch` with these arguments would capture; nothing is captured, and no daemon is needed.

        with capd_client.plan(model, steps="all") as plan:
            model(x).sum().backward()  # gives shapes and bytes
        print(plan)

    Modules that are watched already are left out. Arguments and errors as for `watch`: nothing is raised without
    CAPD_STRICT=1.
    """
    sink = PlanSink(load_config())
    handle = attached(
        sink, model, "plan", name=name, steps=steps, tensors=tensors, select=select, slices=slices
    )
    shared_rules_of(sink.context).tell()
    return Plan(sink, handle)


def _is_linear(parameter: Any, module: Any) -> TypeGuard[Tensor]:
    """Whether the parameter is [out, in]; a sharded one may be flat, a quantised one packed."""
    if not isinstance(module, nn.Linear) or not isinstance(parameter, Tensor):
        return False
    return parameter.ndim == 2 and parameter.is_floating_point()


def _expected(tap: Any, sink: PlanSink) -> list[dict[str, Any]]:
    """What one tap would capture, as far as its module tells."""
    module, kind = tap.module(), tap.kind
    parameter = local_part(getattr(module, kind.parameter, None)) if kind.parameter else None
    widths = (
        {"input": parameter.shape[1], "output": parameter.shape[0]} if _is_linear(parameter, module) else {}
    )
    rows = []
    for tensor_name in kind.tensors:
        if tensor_name not in tap.tensors:
            continue
        of = tensor_name.removeprefix("grad_")
        shape: list[Any] = ["…"]
        if of == kind.parameter and isinstance(parameter, Tensor):
            shape = list(tap.shape_of(tensor_name, tuple(parameter.shape)))
        elif of in widths:
            shape = ["rows", widths[of]]
        operation, phase = placement(tensor_name)
        rows.append({
            "module": tap.name, "layer": tap.place.layer, "stack": tap.place.stack, "layer_type": kind.layer_type,
            "component": kind.component, "operation": operation, "phase": phase, "tensor_name": tensor_name,
            "dtype": str(parameter.dtype).removeprefix("torch.") if isinstance(parameter, Tensor) else "…",
            "kept": "tensor" if tap.keeps_tensor(tensor_name) else "statistics",
            "steps": tap.steps_of(tensor_name),
            "shapes": [shape],
        })  # fmt: skip
    return rows
