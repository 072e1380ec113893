"""The seam of the flight recorder: what rules, tools and ranks ask of it."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Keeper", "NoRecorder"]


class Keeper(Protocol):
    """Keeps the tensors of the iterations around an event. Any thread may call it; it neither blocks nor raises."""

    def keep(
        self,
        run_id: str,
        iteration: int | None,
        reason: str,
        *,
        post: int | None = None,
        attempt: int | None = None,
        asker: str = "",
    ) -> str:
        """Keep the last iterations of all ranks of a run, and some that follow.

        Args:
            run_id: The run.
            iteration: The iteration of the event; None: the newest one that is held.
            reason: The reason, for the metadata of the records.
            post: The iterations to keep after the event; None: as the settings say.
            attempt: The attempt of the run; None: the newest.
            asker: The rank that asks, which may do so some times a minute; "" for all that have limits of their own.

        Returns:
            Why nothing can be kept; "" if it is.
        """


class NoRecorder:
    """The keeper of a daemon without [window]: there is nothing to keep, because every record is stored."""

    def keep(
        self,
        run_id: str,
        iteration: int | None,
        reason: str,
        *,
        post: int | None = None,
        attempt: int | None = None,
        asker: str = "",
    ) -> str:
        """Return why nothing is kept."""
        return (
            "this daemon has no flight recorder, so every capture is stored; put iterations = 8 into [window] of "
            "capd.toml, and restart the daemon"
        )
