"""The captured calls of a run's products, as `capd check`, `capd replay` and `capd report` find them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from capd.cli.output import human_count, note
from capd.cli.selection import Tests
from capd.cli.sources import SourceOptions, Sources
from capd.errors import ConfigError
from capd.store.objects.address import place_of

if TYPE_CHECKING:
    from capd.io.items import Skipped
    from capd.products.captured.calls import ProductCalls

__all__ = ["calls_in", "is_logical", "say_left_out"]

_MOST_REASONS = 12


def is_logical(found: Sources, options: SourceOptions) -> bool:
    """Return whether tensors are put together from all ranks: for a run of several, none of which was chosen."""
    ranks = {one.series.key.rank for one in found.items.series or ()}
    return len(ranks) > 1 and not options.keys.rank and len(found.names) == 1


def calls_in(found: Sources, tests: Tests, skipped: list[Skipped], *, is_whole: bool) -> ProductCalls:
    """Return the calls of a run, without elements.

    Args:
        found: The records.
        tests: The tests of keys that choose tensors to put together.
        skipped: Gets the records that could not be read. They are named on stderr, too.
        is_whole: Whether tensors are put together from the parts of all ranks.

    Raises:
        ConfigError: The records are of several runs.
    """
    from capd.io.items import UNREADABLE
    from capd.io.items import skipped as skipped_item
    from capd.products.captured.calls import ProductCalls
    from capd.store.read.store import open_store

    if len(found.names) > 1:
        raise ConfigError("the calls of several runs cannot be told apart; take one run at a time")
    calls = ProductCalls()
    if is_whole:
        for one in open_store(place_of(found.names[0])).logical(attempt=found.attempt):
            if all(test(one.key) for test in tests):
                calls.add_whole(one)
        return calls
    for item in found.items.found:
        try:
            loaded = item.load()
        except UNREADABLE as error:
            skipped.append(skipped_item(item.name, error, damaged=True))
            note(f"skipped {item.name}: {skipped[-1].reason}")
            continue
        if loaded is not None:
            calls.add(item, loaded)
    return calls


def say_left_out(left_out: Counter[str], words: str) -> None:
    """Name on stderr the products that were left out, by reason. `words`: what they are, as "not replayed"."""
    for reason, count in left_out.most_common(_MOST_REASONS):
        note(f"{human_count(count, 'product')} {words}: {reason}")
    if len(left_out) > _MOST_REASONS:
        note(f"{len(left_out) - _MOST_REASONS} further reasons are in --json")
