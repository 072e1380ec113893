"""Control messages of the wire protocol: requests of tools, the steering and draining of ranks, and keeps.

The unions and rules of `capd_client.protocol.messages` include them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional

import msgspec
from msgspec import Meta

from capd_client.protocol.bounds import Count, ShortText, Text
from capd_client.protocol.key import Index
from capd_client.protocol.selection import Selection

__all__ = [
    "MAX_WAIT_S", "Control", "ControlReply", "Drain", "Drained", "Keep", "KeepReply", "Stats", "StatsReply", "Steer",
    "Steered", "Verb",
]  # fmt: skip

# The daemon answers a CONTROL within this time.
MAX_WAIT_S = 3600.0

Verb = Literal["status", "start", "stop", "select", "flush", "keep", "seal", "release", "shutdown"]


class Stats(msgspec.Struct, tag="stats"):
    """A tool asks for live counters, of one run or of all."""

    run_id: Optional[ShortText] = None


class StatsReply(msgspec.Struct, tag="stats_reply"):
    """The counters as JSON-compatible data; the schema is `capd.metrics.DaemonStats`."""

    stats: dict[str, Any]


class Control(msgspec.Struct, tag="control"):
    """A tool asks for an action.

    - status: Report how each rank of the run is steered.
    - start, select: Capture, as the job's settings say or as `selection` does.
    - stop: Capture nothing.
    - flush: Answer once everything captured so far is committed.
    - keep: Have the flight recorder keep the iterations around `iteration`, or around the newest one.
    - seal: Publish a run's records.
    - release: Close a sealed run without ranks, so that a tool may remove it.
    - shutdown: End the daemon.

    start, select and stop apply from `from_iteration`, or from the next iteration that every rank can still begin
    together. The answer comes once they are in force on every live rank, but within `wait_s`.

    Attributes:
        verb: The action.
        run_id: The run; None is the only live run, or all runs for seal.
        selection: The selection of start and select.
        from_iteration: The first iteration of start, select and stop.
        wait_s: The longest wait for the answer, in seconds.
        iteration: The iteration of keep.
        reason: The reason of keep.
    """

    verb: Verb
    run_id: Optional[ShortText] = None
    selection: Optional[Selection] = None
    from_iteration: Optional[Index] = None
    wait_s: Annotated[float, Meta(ge=0, le=MAX_WAIT_S)] = 0.0
    iteration: Optional[Index] = None
    reason: ShortText = ""


class ControlReply(msgspec.Struct, tag="control_reply"):
    """The outcome of a CONTROL.

    Attributes:
        code: "nothing" if there is no such run, rank or module.
        message: The outcome in words.
        ranks: The live ranks of the run, each as `capd.metrics.RankControl`; empty if one frame cannot hold them.
    """

    code: Literal["ok", "failed", "usage", "nothing"]
    message: Text
    ranks: list[dict[str, Any]] = []

    @property
    def ok(self) -> bool:
        """Whether the action was done."""
        return self.code == "ok"


class Steer(msgspec.Struct, tag="steer", frozen=True, kw_only=True):
    """The capture wanted of a rank, from the first iteration that it begins at or after `from_iteration`.

    Attributes:
        id: A number that grows with every change in a run.
        from_iteration: The first iteration of this capture.
        capturing: False captures nothing.
        selection: The tensors to capture; None is the selection of the job's settings.
    """

    id: Count
    from_iteration: Index
    capturing: bool = True
    selection: Optional[Selection] = None


class Steered(msgspec.Struct, tag="steered", kw_only=True):
    """How a rank is steered.

    Attributes:
        id: The id of the newest STEER that the rank received.
        in_force: The STEER that the rank follows, since its iteration `since`.
        pending: The STEER that the rank will follow from its next iteration boundary.
        modules: The number of modules captured under `in_force` on this rank.
        problem: Why the rank could not follow the newest STEER.
    """

    id: Count
    in_force: Optional[Steer] = None
    since: Optional[Index] = None
    pending: Optional[Steer] = None
    modules: Count = 0
    problem: Text = ""


class Drain(msgspec.Struct, tag="drain"):
    """The daemon asks for DRAINED once everything captured before is committed or dropped. Ids grow in a session."""

    id: Count


class Drained(msgspec.Struct, tag="drained"):
    """The answer to DRAIN."""

    id: Count


class Keep(msgspec.Struct, tag="keep", frozen=True):
    """A rank asks the flight recorder to keep the iterations around one. Ids grow in a process.

    Attributes:
        id: The number of the keep. A rank repeats an unanswered keep on its next connection.
        reason: The reason, for the metadata of the records.
        iteration: The iteration of the event; None is the newest one.
    """

    id: Count
    reason: ShortText
    iteration: Optional[Index] = None


class KeepReply(msgspec.Struct, tag="kept"):
    """The answer to KEEP. `problem` says why nothing is kept; it is empty if something is."""

    id: Count
    problem: Text = ""
