"""`capd_client.plan(model)`: shows what `watch(model)` would capture, in a job or a notebook, without a daemon."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Optional, Union

from torch import Tensor, nn

from capd_client.config.settings import load_config
from capd_client.config.watch_arguments import Select
from capd_client.errors import ConfigError
from capd_client.planning.disk import disk_plan, disk_settings, run_max_setting
from capd_client.planning.session import PlanSession
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
    """A preview of a `watch` with the same arguments. It prints as a table.

    Before a training step, the plan shows modules, tensors and dtypes, the shapes of parameters, and the widths of
    activations. At most three steps that run under the plan add shapes, records and bytes.

    A plan is a context manager. Its hooks are removed at the end of the context, by `remove()`, or when nothing refers
    to the plan. The results stay.
    """

    def __init__(self, sink: PlanSession, handle: WatchHandle) -> None:
        self._sink = sink
        self._handle = handle
        # After `print(plan(model))`, no hook must stay on the model.
        weakref.finalize(self, handle.remove).atexit = False
        self._expected = [row for tap in handle.taps for row in _expected(tap, sink)]

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove every hook. May be called twice."""
        self._sink.stop_clock()
        self._sink.enabled = False
        self._handle.remove()

    def as_dict(self) -> dict[str, Any]:
        """Return the plan of this process in the form of `capd plan --json` (docs/json.md).

        The entry `expected` has the tensors that are known before the first step. The call measures the link, which
        takes some milliseconds, and waits for the GPU.
        """
        host, sink = socket.gethostname(), self._sink
        disk, problems = None, []
        try:
            disk = disk_plan(*disk_settings(os.environ), run_max_setting(os.environ))
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
    """Return a preview of `watch` with these arguments. It captures nothing and needs no daemon.

        with capd_client.plan(model, steps="all") as plan:
            model(x).sum().backward()  # gives shapes and bytes
        print(plan)

    Modules that are already watched are left out. Arguments and errors are as for `watch`: nothing is raised without
    CAPD_STRICT=1.
    """
    sink = PlanSession(replace(load_config(), plan=None))
    handle = attached(
        sink, model, "plan", name=name, steps=steps, tensors=tensors, select=select, slices=slices
    )
    shared_rules_of(sink.context).report()
    return Plan(sink, handle)


def _is_linear(parameter: Any, module: Any) -> TypeGuard[Tensor]:
    """Return whether the parameter's shape is [out, in]. A sharded parameter may be flat, a quantised one packed."""
    if not isinstance(module, nn.Linear) or not isinstance(parameter, Tensor):
        return False
    return parameter.ndim == 2 and parameter.is_floating_point()


def _expected(tap: Any, sink: PlanSession) -> list[dict[str, Any]]:
    """Return the tensors that one tap would capture, as far as its module shows."""
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
            shape = list(tap.offers.shape_of(tensor_name, tuple(parameter.shape)))
        elif of in widths:
            shape = ["rows", widths[of]]
        operation, phase = placement(tensor_name)
        rows.append({
            **tap.place._asdict(), "layer_type": kind.layer_type, "component": kind.component,
            "operation": operation, "phase": phase, "tensor_name": tensor_name,
            "dtype": str(parameter.dtype).removeprefix("torch.") if isinstance(parameter, Tensor) else "…",
            "kept": "tensor" if tap.offers.wanted(tensor_name).keeping else "statistics",
            "steps": tap.steps_of(tensor_name),
            "shapes": [shape],
        })  # fmt: skip
    return rows
