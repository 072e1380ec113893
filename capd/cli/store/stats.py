"""`capd stats`: shows the counters of a run, live from the daemon or as the store persisted them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from capd.cli.options import Wide, flag, option
from capd.cli.output import note, print_either
from capd.cli.store.stats_view import render
from capd.cli.stores import RunOption, StoreArgument
from capd.cli.table import note_left_out, print_columns
from capd.errors import ConfigError

if TYPE_CHECKING:
    from capd.cli.store.counters import Source

__all__ = ["stats"]


def stats(
    store: StoreArgument = None,
    run: RunOption = None,
    watch: Annotated[bool, flag("--watch", "Refresh until Ctrl-C, also after the daemon is gone.")] = False,
    interval: Annotated[float, option("--interval", "SECONDS", "Pause between refreshes.", min=0.1)] = 1.0,
    drops: Annotated[
        bool, flag("--drops", "List the drops instead: by key and reason, with iterations.")
    ] = False,
    wide: Wide = False,
    as_json: Annotated[bool, flag("--json", "Print JSON; with --watch one object per line.")] = False,
) -> None:
    """Show the counters of a run: offered, committed, in flight, dropped, rate, compression, disk left.

    The daemon answers (CAPD_ENDPOINT, or the default path) if it writes the run. Otherwise the counters come from
    the store, where they are at most one second old.

    If captures were lost, the first line says how many, why, and which setting to change. Captures that your
    settings leave out (sampled, stopped, expired) have a line of their own. What a flight recorder holds, lets go and
    has kept has lines, too, also after its daemon ended.

    --drops lists the drops by key and reason, over all ranks. The counts add up to the counters.

    \b
    Examples:
      capd stats
      capd stats captures --run exp7 --watch
      capd stats captures --drops
    """
    from capd.cli.store.counters import Source

    source = Source(store, run)
    if drops:
        if watch:
            raise ConfigError("give one of --watch and --drops")
        _drops(source, as_json, wide=wide)
        return
    if watch:
        from capd.cli.store.stats_watch import watch_counters

        watch_counters(source, interval, as_json=as_json, wide=wide)
        return
    counters = source.read()
    if source.instead:
        note(source.instead)
    lines, left_out = render(counters, wide=wide)
    print_either(counters.model_dump(), lines, as_json=as_json)
    if not as_json:
        note_left_out(left_out)


def _drops(source: Source, as_json: bool, *, wide: bool) -> None:
    """Print the store's ledger. With a live daemon it is at most a second old."""
    from capd.cli.store.drops import drop_columns
    from capd.drops import drops_of
    from capd.store.read.store import open_store

    found = drops_of(open_store(source.read().path).sessions)
    if found and not as_json:
        print_columns(drop_columns(found), wide=wide)
    else:
        print_either(found, ["nothing was dropped"], as_json=as_json)
