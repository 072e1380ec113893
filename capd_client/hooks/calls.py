"""The calls of one product: decides which calls are captured, and numbers them."""

from __future__ import annotations

from typing import Optional

import msgspec

from capd_client.protocol.key import Moment
from capd_client.steps import checkpointing
from capd_client.steps.gate import Gate
from capd_client.steps.trial_runs import trying

__all__ = ["Call", "CapturedCalls"]


class Call(msgspec.Struct, frozen=True):
    """A captured call of a tapped product, while it runs.

    Attributes:
        moment: The moment of its records.
        rules: The rules that captured this moment, as bits. The call's gradients follow the same rules.
        rank: The rank of its records.
        recomputing: Whether activation checkpointing runs the call again.
        metadata: A JSON object, or empty.
        hook: The number of the hook on the call's parameter (`capd_client.hooks.gradients`). -1 if the parameter's
            gradient is not wanted, or if only this call uses the parameter.
    """

    moment: Moment
    rules: int
    rank: int
    recomputing: bool = False
    metadata: str = ""
    hook: int = -1


class CapturedCalls:
    """The captured calls of one tap, numbered in each micro-batch."""

    __slots__ = ("_counts", "_gate", "at")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        # The calls in each micro-batch of the iteration `at`.
        self._counts: dict[int, int] = {}
        # The last iteration in which a call was captured.
        self.at = -1

    def next(self, rules: int) -> Optional[Call]:
        """Return the call that is about to run, or None if it is not captured.

        In a backward, activation checkpointing runs the call again. The result is then the call of the first pass.

        Args:
            rules: The rules of the product, as bits.
        """
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
        """Remember the call for its recompute, if it runs in a checkpointed segment."""
        checkpointing.keep(self, call)
