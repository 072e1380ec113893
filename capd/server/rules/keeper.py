"""The seam of the flight recorder: what a rule with `action = "keep"` asks."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Keeper"]


class Keeper(Protocol):
    """Keeps the tensors of the iterations around an alert. Any thread may call it; it neither blocks nor raises."""

    def keep(self, run_id: str, iteration: int, reason: str) -> None:
        """Keep the last iterations of all ranks of a run.

        Args:
            run_id: The run.
            iteration: The iteration of the alert.
            reason: The name of the rule.
        """
