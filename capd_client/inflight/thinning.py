"""The policy `thin`: while there is no room, fewer calls are captured, each of them whole.

A call is (iteration, micro-batch, call). At factor F, a call is kept if the sum of these three is a multiple of F
(of N·F with mode sample:1/N). So a full buffer leaves every Fth call whole, instead of random tensors of all calls.
The factor doubles when a call of the present factor met a full buffer. It halves after CALM kept calls without one.
"""

from __future__ import annotations

from capd_client.protocol.key import Moment

__all__ = ["CALM", "MAX_FACTOR", "REMEMBERED", "Thinning"]

MAX_FACTOR = 1024
CALM = 64
# Calls whose factor is remembered: their gradients come later, when the present factor may be different.
REMEMBERED = 1024


class Thinning:
    """The choice of calls that are kept. `factor` applies to a call that begins now. Used under the queue's lock.

    The factor of a call is fixed when its first capture is offered. A refusal takes effect with the next call. It
    doubles the factor only once, however many captures of a call were refused.

    Args:
        every: N of the sampling before it (sample:1/N).
    """

    def __init__(self, every: int = 1) -> None:
        self.factor = 1
        self._every = every
        # Whether a call of the present factor met a full buffer.
        self._full = False
        # Kept calls that began after the last refusal or change.
        self._calm = 0
        self._factors: dict[tuple[int, int, int], int] = {}

    def keeps(self, moment: Moment) -> bool:
        """Return whether the captures of this call are kept. The answer is the same for all of them."""
        at = (moment.iteration, moment.micro_batch, moment.call)
        factor = self._factors.get(at)
        if factor is None:
            factor = self._begin(at)
        return self._is_kept(at, factor)

    def refused(self, moment: Moment) -> None:
        """Note that a capture of this call met a full buffer."""
        self._calm = 0
        if self._factors.get((moment.iteration, moment.micro_batch, moment.call)) == self.factor:
            self._full = True

    def restart(self) -> None:
        """Begin at factor 1 again, because the daemon is back or was replaced."""
        self.factor, self._full, self._calm = 1, False, 0

    @property
    def one_of(self) -> int:
        """The N of "one of N calls", for the next call that begins."""
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
