"""The replay of a run's linear layers, as `capd replay` and `capd report` start it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from capd.cli.output import human_count
from capd.cli.products.calls import calls_in, is_logical, say_left_out
from capd.cli.progress import Progress
from capd.cli.selection import Tests
from capd.cli.sources import SourceOptions, Sources, found_in
from capd.errors import ConfigError, DamagedRecord, NothingMatched
from capd.store.objects.address import place_of

if TYPE_CHECKING:
    from capd.replay.recipes import ReplayRecipe
    from capd.replay.replaying import Replayed
    from capd.replay.request import ReplayRequest

__all__ = ["recipes_of", "replay_numbers", "replayed_of"]


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
    from capd.products.captured.calls import sampled
    from capd.replay.groups import BY_LAYER, ReplayGroups
    from capd.replay.replaying import Replayed, replay
    from capd.server.heap import settled_heap

    torch.set_num_threads(found.threads)
    replayed = Replayed(ReplayGroups(list(dict.fromkeys(((), fields, BY_LAYER)))))
    modules = calls_in(found, tests, replayed.skipped, is_whole=request.is_logical).by_module()
    calls = [call for module in modules for call in sampled(module, found.share)]
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
    say_left_out(replayed.left_out, "not replayed")
    return replay_document(again.names, request, replayed, fields)
