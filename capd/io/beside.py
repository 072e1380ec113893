"""Records of several runs beside each other: the run's name begins their quant type, so all groups keep them apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from msgspec import structs

from capd.io.items import Item, Items, Loaded

__all__ = ["beside", "type_within_run"]

_BETWEEN = ": "


def beside(runs: Mapping[str, Items]) -> Items:
    """Return the items of all runs. An item of the run `a` has the quant type `a: bf16` instead of `bf16`.

    Args:
        runs: The items of each run, by its name.
    """

    def each() -> Iterator[Item]:
        for run, items in runs.items():
            yield from (_of_run(run, item) for item in items.found)

    return Items(sum(items.total for items in runs.values()), each())


def type_within_run(quant_type: object) -> str:
    """Return a quant type without the name of a run."""
    return str(quant_type).rpartition(_BETWEEN)[2]


def _of_run(run: str, item: Item) -> Item:
    def load() -> Loaded | None:
        loaded = item.load()
        if loaded is None:
            return None
        key = structs.replace(loaded.key, quant_type=f"{run}{_BETWEEN}{loaded.key.quant_type}")
        return replace(loaded, key=key)

    return replace(item, name=f"{run}/{item.name}", load=load)
