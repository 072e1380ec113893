"""Policy `thin`: while there is no room, fewer calls are captured, each of them whole.

A call is (iteration, micro-batch, call). At factor F those are kept whose sum of the three is a multiple of F (of N·F
behind mode sample:1/N), so that a full buffer costs every Fth call instead of random tensors of all of them. The
factor doubles when a call of the present factor met a full buffer, and halves after CALM kept calls that met none.
"""

from __future__ import annotations

from capd_client.protocol.key import Moment

__all__ = ["CALM", "MAX_FACTOR", "REMEMBERED", "Thinning"]

MAX_FACTOR = 1024
CALM = 64
REMEMBERED = (
    1024  # calls whose fate is remembered: their gradients come later, when the factor may be another
)


class Thinning:
    """Which calls are kept. `factor` is that of a call which begins now. Used under the queue's lock.

    every: N of the sampling in front. A call's factor is that of the time when its first capture is offered. A refusal
    takes effect from the next call on, and doubles the factor once however many captures of a call it hits.
    """

    def __init__(self, every: int = 1) -> None:
        self.factor = 1
        self._every = every
        self._full = False  # a call of the present factor met a full buffer
        self._calm = 0  # kept calls begun since the last refusal or change
        self._factors: dict[tuple[int, int, int], int] = {}

    def keeps(self, moment: Moment) -> bool:
        """Whether the captures of this call are kept; the same answer for all of them."""
        at = (moment.iteration, moment.micro_batch, moment.call)
        factor = self._factors.get(at)
        if factor is None:
            factor = self._begin(at)
        return self._is_kept(at, factor)

    def refused(self, moment: Moment) -> None:
        """A capture of this call met a full buffer."""
        self._calm = 0
        if self._factors.get((moment.iteration, moment.micro_batch, moment.call)) == self.factor:
            self._full = True

    def restart(self) -> None:
        """Begin anew at factor 1: the daemon is another, or back."""
        self.factor, self._full, self._calm = 1, False, 0

    @property
    def one_of(self) -> int:
        """Of how many calls the next one to begin is one, as things stand."""
        return self._every * (min(2 * self.factor, MAX_FACTOR) if self._full else self.factor)

    def _begin(self, at: tuple[int, int, int]) -> int:
        if self._full:
            self.factor, self._full = min(2 * self.factor, MAX_FACTOR), False
        elif self._calm >= CALM:
            self.factor, self._calm = max(1, self.factor // 2), 0
        if len(self._factors) >= REMEMBERED:
            del self._factors[next(iter(self._factors))]
        self._factors[at] = self.factor
        self._calm += self._is_kept(at, self.factor)
        return self.factor

    def _is_kept(self, at: tuple[int, int, int], factor: int) -> bool:
        return not sum(at) % (self._every * factor)
