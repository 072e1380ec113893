"""The report of a collection run as plain values: records, bytes, statistics by each field, and drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from capd.analyze.groups import FIELDS, KEY_FIELDS, MOMENT_FIELDS, Tally, Value, in_order
from capd.collect.state import CollectionState
from capd.drops import drops_of
from capd.store.read.store import Record, Series, Store
from capd_client.protocol.dtypes import ITEM_NBYTES

__all__ = ["FIELDS", "collection_report", "groups_of"]


def collection_report(store: Store, state: CollectionState) -> dict[str, Any]:
    """Compute the report of a run. It reads the row of every record once, one at a time.

    Returns:
        The documented report. Its floats may be infinite; the caller decides how to print them.

    Raises:
        StoreError: If a record's row cannot be read.
    """
    sums: dict[str, dict[Value, Tally]] = {name: {} for name in FIELDS}
    emulation: dict[str, dict[str, int]] = {}
    all_records, stored = Tally(), 0
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
        all_records.add(whole)
        stored += series.stored_bytes
    return {
        "path": str(Path(str(store.path)).absolute()),
        "types": [one.model_dump() for one in state.types],
        "records": all_records.records,
        "raw_bytes": all_records.raw_bytes,
        "stored_bytes": stored,
        "by": {name: groups_of(found) for name, found in sums.items()},
        "dropped": _dropped(store),
        "emulation": emulation,
    }


def _sized(series: Series) -> Iterator[tuple[Record, int]]:
    """Yield each record with the number of its kept bytes."""
    constant = series.raw_bytes // max(1, len(series)) if series.kept == "statistics" else None
    for record in series.records:
        yield record, prod(record.shape) * ITEM_NBYTES[series.dtype] if constant is None else constant


def groups_of(tallies: Mapping[Value, Tally]) -> list[dict[str, Any]]:
    """Return the groups of one field in the order of its values: records, bytes and statistics of each group."""
    return [{"value": value, **tallies[value].numbers()} for value in in_order(tallies)]


def _dropped(store: Store) -> list[dict[str, Any]]:
    """Return the drops of all sessions by label and reason. Drops without a key have no label."""
    found: Counter[tuple[str, str]] = Counter()
    for drop in drops_of(store.sessions):
        found[drop["quant_type"], drop["reason"]] += drop["count"]
    return [
        {"quant_type": quant_type, "reason": reason, "count": count}
        for (quant_type, reason), count in sorted(found.items())
    ]
