"""Which rules of one watch capture the step and micro-batch that the job is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from capd_client.process.log import Notices
from capd_client.protocol.quota import Quota
from capd_client.protocol.selection import Ranges
from capd_client.rules.resolve import When
from capd_client.steps.context import Context

__all__ = ["Gate"]

_notices = Notices()


class Gate:
    """Which rules are open now, for the taps of one watch; rule n is the bit 1 << n.

    A tap's first question is `gate.closed_at == gate.context.iteration`: one comparison when the answer is
    "not captured". Everything else is asked after it, and worked out once per iteration.
    """

    __slots__ = (
        "_ended_at", "_limited", "_open", "_open_at", "_own", "_quota", "_silent", "_whens", "closed_at", "context",
    )  # fmt: skip

    def __init__(self, context: Context, whens: Sequence[When], quota: Optional[Quota] = None) -> None:
        """quota: of a collection run, the micro-batches that are captured of those that the rules admit."""
        self.context = context
        self._quota = quota
        if quota is not None:
            quota.watched = True
        self.closed_at = -1  # the iteration known not to be captured
        self._ended_at = -1  # the iteration of which only those that capture all steps capture more
        self._open_at = -1  # the iteration that the next two are of
        self._open = 0  # the rules that capture it
        self._limited: tuple[tuple[int, Ranges], ...] = ()  # those of them that leave micro-batches out
        self._whens = self._own = tuple(whens)
        self._silent = True  # it was never open, and why was not said

    def steps_of(self, rules: int) -> str:
        """The steps that the job itself selected with these rules, whatever it was told since."""
        texts = [when.steps.text for number, when in enumerate(self._own) if rules >> number & 1]
        return ",".join(dict.fromkeys(texts))

    def whole(self, iteration: int) -> int:
        """The rules that capture all micro-batches of `iteration` on this rank."""
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
        """The rules that capture the current moment. Call it in training forwards only, outside a recompute."""
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
        """A job that was resumed begins after the steps that were meant, as a rule."""
        if not self._silent or not self._whens or any(when.steps.reaches(iteration) for when in self._whens):
            return
        self._silent = False
        rank = self.context.rank
        meant = [when.steps.text for when in self._whens if when.on(rank)]
        if meant:
            _notices.warn(
                "over",
                'nothing is captured: the job is at iteration %d, and steps "%s" lie before it. A resumed job '
                'counts on from where it was: choose watch(steps="%d"), CAPD_STEPS=%d, [when] steps, or "all"',
                iteration,
                ",".join(dict.fromkeys(meant)),
                iteration,
                iteration,
            )

    def steer(self, whens: Sequence[When]) -> bool:
        """Put `whens` in the place of the gate's own; returns whether this rank may pass at all."""
        self._whens = tuple(whens)
        self.forget()
        return any(when.on(self.context.rank) for when in whens)

    def end_iteration(self) -> None:
        """Capture no more of the current iteration, except by rules that capture all of them."""
        self._ended_at = self.context.iteration
        self.forget()

    def forget(self) -> None:
        """Ask again at the next forward."""
        self.closed_at = self._open_at = -1
