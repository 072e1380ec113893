"""Messages of the wire protocol for what tools ask, and for how ranks are steered and drained on their behalf.

The rules are in `capd_client.protocol.messages`, whose unions these are part of.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional

import msgspec
from msgspec import Meta

from capd_client.protocol.bounds import Count, ShortText, Text
from capd_client.protocol.key import Index
from capd_client.protocol.selection import Selection

__all__ = [
    "MAX_WAIT_S", "Control", "ControlReply", "Drain", "Drained", "Stats", "StatsReply", "Steer", "Steered", "Verb",
]  # fmt: skip

MAX_WAIT_S = 3600.0  # a CONTROL is answered within this time

Verb = Literal["status", "start", "stop", "select", "flush", "seal", "shutdown"]


class Stats(msgspec.Struct, tag="stats"):
    """A tool asks for live counters, of one run or of all."""

    run_id: Optional[ShortText] = None


class StatsReply(msgspec.Struct, tag="stats_reply"):
    """Counters as JSON-compatible data; the schema is `capd.metrics.DaemonStats`."""

    stats: dict[str, Any]


class Control(msgspec.Struct, tag="control"):
    """A tool asks for an action. `run_id` None: the only live run (seal: all of them).

    status: how each rank of the run is steered. start, select: capture, as the job says or as `selection` does.
    stop: capture nothing. These three hold from `from_iteration`, or the next one that every rank can still begin
    together, and are answered once they are in force on every live rank, at the latest after `wait_s`. flush: as
    soon as everything captured so far is committed. seal: publish a run's records. shutdown: end the daemon.
    """

    verb: Verb
    run_id: Optional[ShortText] = None
    selection: Optional[Selection] = None
    from_iteration: Optional[Index] = None
    wait_s: Annotated[float, Meta(ge=0, le=MAX_WAIT_S)] = 0.0


class ControlReply(msgspec.Struct, tag="control_reply"):
    """Outcome of a CONTROL. nothing: there is no such run, rank or module. `message` says it in words.

    ranks: the live ranks of the run, each as `capd.metrics.RankControl`; empty where one frame cannot hold them.
    """

    code: Literal["ok", "failed", "usage", "nothing"]
    message: Text
    ranks: list[dict[str, Any]] = []

    @property
    def ok(self) -> bool:
        """Whether it was done."""
        return self.code == "ok"


class Steer(msgspec.Struct, tag="steer", frozen=True, kw_only=True):
    """The capture that is wanted of a rank, from the first iteration it begins at or behind `from_iteration`.

    id: grows with every change in a run. capturing False: nothing is captured. selection None: as the job says.
    """

    id: Count
    from_iteration: Index
    capturing: bool = True
    selection: Optional[Selection] = None


class Steered(msgspec.Struct, tag="steered", kw_only=True):
    """How a rank is steered: `in_force` since its iteration `since`, `pending` until its next boundary.

    id: of the newest STEER it met; `problem` says why that one could not be followed. modules: how many modules
    are captured under `in_force`, on this rank.
    """

    id: Count
    in_force: Optional[Steer] = None
    since: Optional[Index] = None
    pending: Optional[Steer] = None
    modules: Count = 0
    problem: Text = ""


class Drain(msgspec.Struct, tag="drain"):
    """Answer once everything captured before is committed or dropped. Ids grow within a session."""

    id: Count


class Drained(msgspec.Struct, tag="drained"):
    """Answer to DRAIN."""

    id: Count
