"""The gradient hooks: on the tensors of one call, and on a product's parameter.

The gradient of a parameter arrives once per backward, as the sum over the calls in it. It does not name these calls.
The gradient of each output arrives before it, and leaves its call with the hook of the parameter.

The parameter may be another tensor in every forward. FSDP creates new views of a flat parameter, and a packed weight is
split again for every call. Each tensor keeps its hook until its own backward. Other forwards may run before it.
"""

from __future__ import annotations

import itertools
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from capd_client.hooks.base import Hook
from capd_client.hooks.calls import Call
from capd_client.process.dynamo import untraced
from capd_client.steps import split_backward
from capd_client.tensors.autograd import hang, hangs_on

__all__ = ["GradHook", "ParameterHooks"]

_numbers = itertools.count()


class GradHook(Hook):
    """A tensor hook that carries a call's moment into its backward. The tap (`hooks.tap.Tap`) takes the gradient."""

    __slots__ = ("_call", "_shape", "_tap", "_tensor_name")

    def __init__(self, tap: Any, tensor_name: str, call: Call, shape: Optional[torch.Size] = None) -> None:
        self._shape = shape
        self._tap = tap
        self._tensor_name = tensor_name
        self._call = call

    # Compiled autograd would trace the hook.
    @untraced
    def __call__(self, gradient: Tensor) -> None:
        try:
            self._tap.gradient(self._tensor_name, gradient, self._call, self._shape)
        except Exception as error:
            self._tap.failed(f"{self._tensor_name} hook", error)


class ParameterHook(Hook):
    """A tensor hook on a parameter. It runs once per backward, before the gradient is accumulated."""

    __slots__ = ("_deferred", "_expected", "_tap")

    def __init__(self, tap: Any) -> None:
        self._tap = tap
        # The graph task of the last dY, and the first call of that backward.
        self._expected: tuple[int, Optional[Call]] = (-1, None)
        # micro-batch → the call whose dW a later backward computes.
        self._deferred: dict[int, Call] = {}

    def expect(self, call: Call) -> None:
        """Note that the gradient of the call's output has arrived.

        A backward visits calls in reverse order. The first call is noted last and stays.
        """
        if split_backward.only_inputs():
            self._deferred[call.moment.micro_batch] = call
        else:
            self._expected = (torch._C._current_graph_task_id(), call)

    # Compiled autograd would trace the hook.
    @untraced
    def __call__(self, gradient: Tensor) -> None:
        tap = self._tap
        try:
            call = self._take()
            if call is not None:
                tap.gradient(f"grad_{tap.kind.parameter}", gradient, call)
        except Exception as error:
            tap.failed(f"grad_{tap.kind.parameter} hook", error)

    def _take(self) -> Optional[Call]:
        """Return the first call of the current backward; None if it is not captured."""
        micro_batch = split_backward.weights_of()
        if micro_batch is not None:
            return self._deferred.pop(micro_batch, None)
        (task, call), self._expected = self._expected, (-1, None)
        return call if task == torch._C._current_graph_task_id() else None


class ParameterHooks:
    """The hooks of one tap on all tensors that are or were its parameter."""

    __slots__ = ("_hanging",)

    def __init__(self) -> None:
        # By number.
        self._hanging: dict[int, tuple[RemovableHandle, ParameterHook]] = {}

    def on(self, parameter: Any, tap: Any) -> int:
        """Return the number of the hook on a call's parameter; put one on if there is none.

        Args:
            parameter: The parameter of a call that is about to run, or None.
            tap: The receiver of its gradient.

        Returns:
            The number, which compiled graphs pass on. -1 if `parameter` gets no gradient.
        """
        if not isinstance(parameter, Tensor) or not parameter.requires_grad:
            return -1
        self._hanging = {n: one for n, one in self._hanging.items() if one[0].hooks_dict_ref() is not None}
        for number, (handle, _) in self._hanging.items():
            if hangs_on(handle, parameter):
                return number
        hook, number = ParameterHook(tap), next(_numbers)
        self._hanging[number] = (hang(parameter, hook), hook)
        return number

    def expect(self, call: Call) -> None:
        """Note that the gradient of the call's output has arrived. The gradient of its parameter follows."""
        _, hook = self._hanging.get(call.hook, (None, None))
        if hook is not None:
            hook.expect(call)

    def remove(self) -> None:
        """Remove all hooks, also hooks that wait for the backward of a graph."""
        for handle, _ in self._hanging.values():
            handle.remove()
        self._hanging = {}
