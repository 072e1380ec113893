"""Whether the taps of one watch capture the step that the job is in."""

from __future__ import annotations

from typing import Optional

from capd_client.notices import Notices
from capd_client.select import Ranges, Selection
from capd_client.stepping import Context

__all__ = ["Gate"]

_notices = Notices()


class Gate:
    """Whether the current step is captured, for the taps of one watch.

    A tap's first question is `gate.closed_at == gate.context.iteration`: one comparison when the answer is
    "not captured". Everything else is asked behind it.
    """

    __slots__ = ("_micro_batches", "_open_at", "_own", "_ranks", "_silent", "_steps", "closed_at", "context")

    def __init__(
        self,
        context: Context,
        steps: Ranges,
        *,
        micro_batches: Ranges | None = None,
        ranks: Ranges | None = None,
    ) -> None:
        self.context = context
        self.closed_at = -1  # the iteration known not to be captured
        self._open_at = -1  # the iteration known to be captured
        self._steps = steps
        self._micro_batches = micro_batches
        self._ranks = ranks
        self._own = (steps, micro_batches, ranks)
        self._silent = True  # it was never open, and why was not said

    @property
    def own_steps(self) -> Ranges:
        """The steps that the job selected, whatever it was told since."""
        return self._own[0]

    def selects(self, iteration: int) -> bool:
        """Whether all micro-batches of `iteration` are captured on this rank."""
        return self._micro_batches is None and self._chosen(iteration)

    def _chosen(self, iteration: int) -> bool:
        return iteration in self._steps and (self._ranks is None or self.context.rank in self._ranks)

    def admits(self) -> bool:
        """Decide for the current moment. Call it in training forwards only, outside a recompute."""
        context = self.context
        if context.evaluating:
            return False
        if self._open_at != context.iteration:
            context.begin_if_dirty()
            iteration = context.iteration
            if not self._chosen(iteration):
                self.closed_at = iteration
                self._say_if_over(iteration)
                return False
            self._open_at = iteration
            self._silent = False
        return self._micro_batches is None or context.micro_batch in self._micro_batches

    def _say_if_over(self, iteration: int) -> None:
        """A job that was resumed begins behind the steps that were meant, as a rule."""
        if not self._silent or self._steps is _NEVER or self._steps.reaches(iteration):
            return
        self._silent = False
        if self._ranks is None or self.context.rank in self._ranks:
            _notices.warn(
                "over",
                'nothing is captured: the job is at iteration %d, and steps "%s" lie before it. A resumed job '
                'counts on from where it was: choose watch(steps="%d"), CAPD_STEPS=%d, [when] steps, or "all"',
                iteration,
                self._steps.text,
                iteration,
                iteration,
            )

    def steer(self, selection: Optional[Selection], *, capturing: bool) -> bool:
        """Put `selection` in the place of the gate's own ranges; returns whether this rank may pass at all."""
        steps, micro_batches, ranks = self._own
        if selection is not None:
            steps = steps if selection.steps is None else Ranges(selection.steps)
            micro_batches = (
                micro_batches if selection.micro_batches is None else Ranges(selection.micro_batches)
            )
            ranks = ranks if selection.ranks is None else Ranges(selection.ranks)
        self._steps, self._micro_batches, self._ranks = steps if capturing else _NEVER, micro_batches, ranks
        self.forget()
        return capturing and (ranks is None or self.context.rank in ranks)

    def forget(self) -> None:
        """Ask again at the next forward: an optimizer has stepped."""
        self.closed_at = self._open_at = -1


_NEVER = Ranges("")
