"""The calls of one product: which of them are captured, and how they are numbered."""

from __future__ import annotations

from typing import Optional, Protocol

import msgspec

from capd_client.protocol.key import Moment
from capd_client.steps import checkpointing
from capd_client.steps.gate import Gate
from capd_client.steps.trial_runs import trying

__all__ = ["Call", "CapturedCalls", "ParameterGradient"]


class ParameterGradient(Protocol):
    """The hook that the gradient of a call's parameter comes through. number: what compiled graphs know it by."""

    @property
    def number(self) -> int: ...

    def expect(self, call: Call) -> None:
        """The gradient of the call's output has come, so that of its parameter follows."""


class Call(msgspec.Struct, frozen=True):
    """One call of a tapped product that is captured, while it runs.

    rules: those that captured its moment, as bits; its gradients follow them. rank: that it is captured as.
    metadata: JSON object, or empty. hook: on the parameter that it uses, if its gradient is wanted and comes by itself.
    """

    moment: Moment
    rules: int
    rank: int
    recomputing: bool = False
    metadata: str = ""
    hook: Optional[ParameterGradient] = None

    @property
    def hook_number(self) -> int:
        """What compiled graphs know the hook by; -1: there is none."""
        return -1 if self.hook is None else self.hook.number


class CapturedCalls:
    """The captured calls of one tap, numbered in each micro-batch."""

    __slots__ = ("_counts", "_gate", "at")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._counts: dict[int, int] = {}  # in each micro-batch of the iteration `at`
        self.at = -1  # the last iteration in which a call was captured

    def next(self, rules: int) -> Optional[Call]:
        """The call about to run, or None if it is not captured. rules: those of the product, as bits."""
        if checkpointing.in_backward():
            first: Optional[Call] = checkpointing.take(self)
            return None if first is None else msgspec.structs.replace(first, recomputing=True)
        rules = 0 if trying() else self._gate.admits() & rules
        if not rules:
            return None
        context = self._gate.context
        if context.iteration != self.at:
            self.at = context.iteration
            self._counts.clear()
        number = self._counts.get(context.micro_batch, 0)
        self._counts[context.micro_batch] = number + 1
        rank = context.bind()
        return Call(context.moment(call=number, recompute=False), rules, rank)

    def keep(self, call: Call) -> None:
        """Remember it for its recompute, if it lies in a checkpointed segment."""
        checkpointing.keep(self, call)
