"""The replay of a run's linear layers, as `capd replay` and `capd report` start it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from capd.cli.output import human_count, note
from capd.cli.progress import Progress
from capd.cli.selection import Tests
from capd.cli.sources import SourceOptions, Sources, found_in
from capd.errors import ConfigError, DamagedRecord, NothingMatched
from capd.store.objects.address import place_of

if TYPE_CHECKING:
    from capd.products.captured.calls import ProductCall
    from capd.replay.recipes import ReplayRecipe
    from capd.replay.replaying import Replayed
    from capd.replay.request import ReplayRequest

__all__ = ["is_logical", "recipes_of", "replay_numbers", "replayed_of", "say_left_out"]

_MOST_REASONS = 8


def recipes_of(text: str) -> tuple[ReplayRecipe, ...]:
    """Return the recipes that `--recipe` names.

    Raises:
        ConfigError: A recipe is unknown, or two have one name.
    """
    from capd.replay.recipes import ReplayRecipe

    found: dict[str, ReplayRecipe] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        recipe = ReplayRecipe.of(word)
        if recipe.name in found:
            raise ConfigError(f"--recipe: {word} is a second recipe of the name {recipe.name!r}")
        found[recipe.name] = recipe
    if not found:
        raise ConfigError("--recipe names no recipe")
    return tuple(found.values())


def is_logical(found: Sources, options: SourceOptions) -> bool:
    """Return whether operands are put together from all ranks: for a run of several, none of which was chosen."""
    ranks = {one.series.key.rank for one in found.items.series or ()}
    return len(ranks) > 1 and not options.keys.rank and len(found.names) == 1


def replayed_of(
    found: Sources, request: ReplayRequest, fields: tuple[str, ...], tests: Tests = ()
) -> Replayed:
    """Replay the calls of a run with a progress bar, and name skipped ones.

    Args:
        found: The records.
        request: What is to be replayed.
        fields: The fields to group by, besides the groups of the figures.
        tests: The tests of keys that choose tensors to put together.

    Raises:
        ConfigError: The records are of several runs.
        NothingMatched: No call could be replayed.
        DamagedRecord: None of the calls could be read.
    """
    import torch

    from capd.io.items import Skipped
    from capd.replay.groups import BY_LAYER, ReplayGroups
    from capd.replay.replaying import Replayed, replay
    from capd.server.heap import settled_heap

    if len(found.names) > 1:
        raise ConfigError("the calls of several runs cannot be told apart; replay one run at a time")
    torch.set_num_threads(found.threads)
    replayed = Replayed(ReplayGroups(list(dict.fromkeys(((), fields, BY_LAYER)))))
    calls = _whole_calls(found, tests) if request.is_logical else _calls(found, replayed)
    with settled_heap(), Progress(len(calls), "calls") as progress:
        for seen in replay(calls, request, replayed):
            if isinstance(seen, Skipped):
                progress.say(f"skipped {seen.name}: {seen.reason}")
            progress.add(0 if isinstance(seen, Skipped) else seen.nbytes)
    if not replayed.replayed:
        if replayed.skipped and not replayed.left_out:
            raise DamagedRecord(f"none of {human_count(replayed.found, 'call')} could be read")
        reasons = "; ".join(replayed.left_out) or "no call of a linear layer was captured"
        raise NothingMatched(f"nothing to replay in {found.names[0]}: {reasons}")
    return replayed


def _calls(found: Sources, replayed: Replayed) -> Sequence[ProductCall]:
    """Return the calls, a share of each module's if a sample is wanted."""
    from capd.io.items import UNREADABLE, skipped
    from capd.products.captured.calls import ProductCalls
    from capd.products.captured.calls import sampled as sampled_calls

    calls = ProductCalls()
    for item in found.items.found:
        try:
            loaded = item.load()
        except UNREADABLE as error:
            replayed.skipped.append(skipped(item.name, error, damaged=True))
            note(f"skipped {item.name}: {replayed.skipped[-1].reason}")
            continue
        if loaded is not None:
            calls.add(item, loaded)
    return [call for module in calls.by_module() for call in sampled_calls(module, found.share)]


def _whole_calls(found: Sources, tests: Tests) -> Sequence[ProductCall]:
    from capd.products.captured.calls import ProductCalls
    from capd.products.captured.calls import sampled as sampled_calls
    from capd.store.read.store import open_store

    calls = ProductCalls()
    for one in open_store(place_of(found.names[0])).logical(attempt=found.attempt):
        if all(test(one.key) for test in tests):
            calls.add_whole(one)
    return [call for module in calls.by_module() for call in sampled_calls(module, found.share)]


def say_left_out(replayed: Replayed) -> None:
    """Name on stderr the products that were not replayed, by reason."""
    for reason, count in replayed.left_out.most_common(_MOST_REASONS):
        note(f"{human_count(count, 'product')} not replayed: {reason}")
    if len(replayed.left_out) > _MOST_REASONS:
        note(f"{len(replayed.left_out) - _MOST_REASONS} further reasons are in --json")


def replay_numbers(found: Sources, recipes: Sequence[ReplayRecipe], options: SourceOptions) -> dict[str, Any]:
    """Replay the run of a report by module, and return the document of the replay.

    A run of which nothing can be replayed is an error, as of `replayed_of`.
    """
    from dataclasses import replace

    from capd.replay.document import replay_document
    from capd.replay.request import ReplayRequest

    fields = ("quant_type", "rank", "layer", "module")
    # The items of a source are found once.
    again = found_in(place_of(found.names[0]), replace(options, run=None))
    request = ReplayRequest(recipes, is_logical=is_logical(again, options))
    replayed = replayed_of(again, request, fields, options.keys.tests())
    say_left_out(replayed)
    return replay_document(again.names, request, replayed, fields)
