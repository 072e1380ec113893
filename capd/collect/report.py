"""What a collection run has collected: records, bytes and value statistics by each field, and what was dropped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from capd.analyze.groups import FIELDS, KEY_FIELDS, MOMENT_FIELDS, STATISTICS, Tally, Value, in_order
from capd.collect.state import CollectionState, TypeState
from capd.store.reader import Record, Series, Store
from capd.store.statistics import Stats
from capd_client.dtypes import ITEM_NBYTES

__all__ = ["FIELDS", "STATISTICS", "CollectionReport", "Dropped", "Group", "as_json", "collection_report"]


@dataclass(frozen=True)
class Group:
    """The records that have one value of a field. raw_bytes: of what is kept of them; stats: of all their elements."""

    value: Value
    records: int
    raw_bytes: int
    stats: Stats


@dataclass(frozen=True)
class Dropped:
    """Captures that are not there, of one label and for one reason. quant_type "": dropped before they had a label."""

    quant_type: str
    reason: str
    count: int


@dataclass(frozen=True)
class CollectionReport:
    """A whole run; `by` has the groups of each of FIELDS.

    emulation: by quant type, how many of its records say which emulation was active; "unknown": those that do not say.
    """

    path: str
    types: list[TypeState]
    records: int
    raw_bytes: int
    stored_bytes: int
    by: dict[str, list[Group]] = field(repr=False)
    dropped: list[Dropped]
    emulation: dict[str, dict[str, int]] = field(default_factory=dict)


def collection_report(store: Store, state: CollectionState) -> CollectionReport:
    """The report of a run. Reads the row of every record once, one at a time; raises what reading a record raises."""
    sums: dict[str, dict[Value, Tally]] = {name: {} for name in FIELDS}
    emulation: dict[str, dict[str, int]] = {}
    records = raw = stored = 0
    for series in store.series:
        whole = Tally()
        for record, nbytes in _sized(series):
            one = Tally(1, nbytes, record.stats)
            whole.add(one)
            said = emulation.setdefault(series.key.quant_type, {})
            text = str(record.attributes.get("emulation", "unknown"))
            said[text] = said.get(text, 0) + 1
            for name in MOMENT_FIELDS:
                sums[name].setdefault(getattr(record, name), Tally()).add(one)
        for name in KEY_FIELDS:
            sums[name].setdefault(getattr(series.key, name), Tally()).add(whole)
        records, raw, stored = records + whole.records, raw + whole.raw_bytes, stored + series.stored_bytes
    return CollectionReport(
        path=str(store.path.absolute()),
        types=state.types,
        records=records,
        raw_bytes=raw,
        stored_bytes=stored,
        by={name: list(_groups(found)) for name, found in sums.items()},
        dropped=_dropped(store),
        emulation=emulation,
    )


def _sized(series: Series) -> Iterator[tuple[Record, int]]:
    """Each record with the bytes that are kept of it."""
    constant = series.raw_bytes // max(1, len(series)) if series.kept == "statistics" else None
    for record in series.records:
        yield record, prod(record.shape) * ITEM_NBYTES[series.dtype] if constant is None else constant


def _groups(sums: dict[Value, Tally]) -> Iterable[Group]:
    return (
        Group(value, sums[value].records, sums[value].raw_bytes, sums[value].stats)
        for value in in_order(sums)
    )


def _dropped(store: Store) -> list[Dropped]:
    """The drops of all sessions; those of a session that its ledger does not name have no label."""
    found: dict[tuple[str, str], int] = {}
    for session in store.sessions:
        rest = dict(session.dropped)
        for row in session.drops:
            rest[row.reason] = rest.get(row.reason, 0) - row.count
            where = (row.key.quant_type, row.reason)
            found[where] = found.get(where, 0) + row.count
        for reason, count in rest.items():
            found["", reason] = found.get(("", reason), 0) + max(0, count)
    return [Dropped(*where, count) for where, count in sorted(found.items()) if count]


def as_json(report: CollectionReport) -> dict[str, Any]:
    """The report as documented; floats as they are, so that whoever prints it decides about infinities."""
    return {
        "path": report.path,
        "types": [one.model_dump() for one in report.types],
        "records": report.records,
        "raw_bytes": report.raw_bytes,
        "stored_bytes": report.stored_bytes,
        "by": {name: [_group(one) for one in groups] for name, groups in report.by.items()},
        "dropped": [vars(one) for one in report.dropped],
        "emulation": report.emulation,
    }


def _group(group: Group) -> dict[str, Any]:
    statistics = {name: getattr(group.stats, name) for name in STATISTICS}
    return {"value": group.value, "records": group.records, "raw_bytes": group.raw_bytes, **statistics}
