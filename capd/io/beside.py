"""Records of several runs beside each other: the run's name begins their quant type, so all groups keep them apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from msgspec import structs

from capd.io.items import Item, Items, Loaded

__all__ = ["beside", "labelled", "type_within_run"]

_BETWEEN = ": "


def beside(runs: Mapping[str, Items]) -> Items:
    """Return the items of all runs. An item of the run `a` has the quant type `a: bf16` instead of `bf16`.

    Args:
        runs: The items of each run, by its name.
    """

    series, before = [], 0
    for run, items in runs.items():
        series += [
            replace(one, label=run, first=one.first._replace(series=one.first.series + before))
            for one in items.series or ()
        ]
        before += len({one.first.series for one in items.series or ()})

    def each() -> Iterator[Item]:
        before = 0
        for run, items in runs.items():
            yield from (labelled(run, item, before) for item in items.found)
            before += len({one.first.series for one in items.series or ()})

    has_series = all(items.series is not None for items in runs.values())
    return Items(sum(items.total for items in runs.values()), each(), series if has_series else None)


def type_within_run(quant_type: object) -> str:
    """Return a quant type without the name of a run."""
    return str(quant_type).rpartition(_BETWEEN)[2]


def labelled(run: str, item: Item, before: int = 0) -> Item:
    """Return an item with the name of its run before its name and its quant type.

    `before`: the number of series of the runs before it, which are added to its place.
    """

    def load() -> Loaded | None:
        loaded = item.load()
        if loaded is None:
            return None
        key = structs.replace(loaded.key, quant_type=f"{run}{_BETWEEN}{loaded.key.quant_type}")
        return replace(loaded, key=key)

    place = item.place and item.place._replace(series=item.place.series + before)
    return replace(item, name=f"{run}/{item.name}", load=load, place=place)
