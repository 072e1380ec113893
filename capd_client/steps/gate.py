"""The gate of a watch: the rules that capture the present step and micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from capd_client.process.log import RateLimitedLog
from capd_client.protocol.quota import Quota
from capd_client.protocol.selection import Ranges
from capd_client.rules.resolve import When
from capd_client.steps.context import Context

__all__ = ["Gate"]

_notices = RateLimitedLog()


class Gate:
    """The rules of one watch that are open now. Rule n is the bit 1 << n.

    A tap first asks `gate.closed_at == gate.context.iteration`. So the answer "not captured" costs one comparison. All
    other questions come after it and are answered once per iteration.
    """

    __slots__ = (
        "_ended_at", "_limited", "_open", "_open_at", "_own", "_quota", "_silent", "_whens", "closed_at", "context",
    )  # fmt: skip

    def __init__(self, context: Context, whens: Sequence[When], quota: Optional[Quota] = None) -> None:
        """Prepare a gate for a watch.

        Args:
            context: The position of the job.
            whens: The conditions of the rules, in the order of the rules.
            quota: The quota of a collection run. It limits the micro-batches that the rules admit.
        """
        self.context = context
        self._quota = quota
        if quota is not None:
            quota.watched = True
        # The iteration that is known not to be captured.
        self.closed_at = -1
        # An iteration that only rules with all steps still capture.
        self._ended_at = -1
        # The iteration of the next two fields.
        self._open_at = -1
        # The rules that capture this iteration.
        self._open = 0
        # The rules among them that leave micro-batches out.
        self._limited: tuple[tuple[int, Ranges], ...] = ()
        self._whens = self._own = tuple(whens)
        # Whether the gate was never open and has not reported the reason.
        self._silent = True

    def steps_of(self, rules: int) -> str:
        """Return the steps that the job itself selected with these rules, without later orders of `capd ctl`."""
        texts = [when.steps.text for number, when in enumerate(self._own) if rules >> number & 1]
        return ",".join(dict.fromkeys(texts))

    def whole(self, iteration: int) -> int:
        """Return the rules that capture all micro-batches of `iteration` on this rank."""
        opened, limited = self._opened(iteration)
        return opened & ~sum(bit for bit, _ in limited)

    def _opened(self, iteration: int) -> tuple[int, tuple[tuple[int, Ranges], ...]]:
        rank = self.context.rank
        found = [
            (1 << number, when.micro_batches)
            for number, when in enumerate(self._whens)
            if iteration in when.steps
            and when.on(rank)
            and (iteration != self._ended_at or when.steps.text == "all")
        ]
        return sum(bit for bit, _ in found), tuple((bit, some) for bit, some in found if some is not None)

    def admits(self) -> int:
        """Return the rules that capture the current moment. Call it only in training forwards, outside a recompute."""
        context = self.context
        if context.evaluating:
            return 0
        if self._open_at != context.iteration:
            context.begin_if_dirty()
            iteration = context.iteration
            self._open, self._limited = self._opened(iteration)
            if not self._open:
                self.closed_at = iteration
                self._say_if_over(iteration)
                return 0
            self._open_at = iteration
            self._silent = False
            if self._quota is not None and not self._quota.room(iteration):
                self.closed_at, self._open_at = iteration, -1
                return 0
        opened = self._open
        for bit, micro_batches in self._limited:
            if context.micro_batch not in micro_batches:
                opened &= ~bit
        if (
            opened
            and self._quota is not None
            and not self._quota.take(context.iteration, context.micro_batch)
        ):
            return 0
        return opened

    def _say_if_over(self, iteration: int) -> None:
        """Warn if all steps are over. Usually the job was resumed and begins after the steps that were meant."""
        if not self._silent or not self._whens or any(when.steps.reaches(iteration) for when in self._whens):
            return
        self._silent = False
        rank = self.context.rank
        meant = [when.steps.text for when in self._whens if when.on(rank)]
        if meant:
            _notices.warn(
                "over",
                'nothing is captured: the job is at iteration %d, and steps "%s" are before it. A resumed job '
                'continues its count: choose watch(steps="%d"), CAPD_STEPS=%d, [when] steps, or "all"',
                iteration,
                ",".join(dict.fromkeys(meant)),
                iteration,
                iteration,
            )

    def steer(self, whens: Sequence[When]) -> bool:
        """Replace the gate's conditions by `whens`. Return whether this rank can capture anything."""
        self._whens = tuple(whens)
        self.forget()
        return any(when.on(self.context.rank) for when in whens)

    def end_iteration(self) -> None:
        """Capture no more of the current iteration, except by rules that capture all of them."""
        self._ended_at = self.context.iteration
        self.forget()

    def forget(self) -> None:
        """Forget the answers, so that the next forward asks again."""
        self.closed_at = self._open_at = -1
