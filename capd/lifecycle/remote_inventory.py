"""The runs below a prefix of an object store with what a list shows of them, from their manifests alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from capd.errors import CapdError
from capd.lifecycle.inventory import RunSummary, add_sessions
from capd.store.objects.address import Address
from capd.store.remote.run import RemoteRun, run_places
from capd.store.segments.manifest import Manifest

__all__ = ["remote_inventory"]

_AT_ONCE = 16


def remote_inventory(prefix: Address) -> list[RunSummary]:
    """Return the runs directly below a prefix, the oldest first.

    A run whose first upload is not complete has no manifest, and is left out.

    Raises:
        ObjectStoreError: The prefix cannot be listed.
    """
    places = run_places(prefix)
    if not places:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(places)), thread_name_prefix="capd-get") as pool:
        found = [one for one in pool.map(_look_at, places) if one is not None]
    return sorted(found, key=lambda one: (one.started_s, one.run_id))


def _look_at(place: Address) -> RunSummary | None:
    facts = RunSummary(place, place.stem, uploaded_to=str(place))
    try:
        run = RemoteRun(place)
        manifests = [node.manifest for node in run.nodes(may_be_none=True)]
        if not manifests:
            return None
        facts.add_marks(run.attributes())
        _add(facts, manifests)
    except CapdError as error:
        facts.state, facts.problem = "unreadable", str(error)
    return facts


def _add(facts: RunSummary, manifests: list[Manifest]) -> None:
    facts.started_s = min(one.written_ns for one in manifests) / 1e9
    facts.ended_s = max(one.written_ns for one in manifests) / 1e9
    facts.nodes = sorted(one.node for one in manifests)
    for one in manifests:
        facts.records += sum(segment.rows for segment in one.records) - one.error_records
        facts.raw_bytes += one.raw_bytes
        facts.stored_bytes += one.stored_bytes
        # The segments are what the catalog is on a disk.
        facts.other_bytes += sum(segment.nbytes for segment in (one.series, *one.records))
        ends = one.first_iteration, one.last_iteration
        facts.add_captured(one.quant_types, None if None in ends else ends)  # type: ignore[arg-type]
    sessions = [row for one in manifests for row in one.sessions]
    add_sessions(facts, sessions)
    live = next((row for row in sessions if row.state == "live"), None)
    if live is not None:
        facts.state, facts.problem = "live", f"rank {live.rank} was connected at the last upload"
    elif not all(one.is_complete for one in manifests):
        facts.state, facts.problem = "open", "not everything is uploaded yet"
