"""`capd alerts`: what rules said about a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from capd.cli.completion import any_of
from capd.cli.options import Wide, flag, option
from capd.cli.output import note, print_json, print_lines
from capd.cli.stores import RunOption, StoreArgument, resolve_run
from capd.cli.table import Column, print_columns
from capd.errors import ConfigError
from capd_client.process.text import printable

if TYPE_CHECKING:
    from capd.store.alerts.alert import Alert

__all__ = ["alerts"]

_LOOK_S = 0.5
_WORDS = ("info", "warning", "critical")
_COLOURS = {"critical": "red", "warning": "bold", "info": ""}


def alerts(
    store: StoreArgument = None,
    run: RunOption = None,
    severity: Annotated[
        str,
        option(
            "--severity",
            "WORD",
            "The least severity: info, warning or critical.",
            autocompletion=any_of(*_WORDS),
        ),
    ] = "info",
    follow: Annotated[
        bool, flag("--follow", "Go on with each alert as it comes, until Ctrl-C.", "-f")
    ] = False,
    wide: Wide = False,
    as_json: Annotated[
        bool, flag("--json", "Print JSON: a list, or with --follow an object a line.")
    ] = False,
) -> None:
    """Print the alerts of a run: what the rules of [[trigger]] in capd.toml said while it was captured.

    It reads the run and asks no daemon, so it also works when the job has ended, and in an object store. With
    --follow it goes on over restarts of the daemon, and with a new run of the name if the run is removed.

    \b
    Examples:
      capd alerts
      capd alerts captures/run.zarr --severity critical --json
      capd alerts --follow
      capd alerts s3://bucket/captures/run.zarr
    """
    from capd.store.read.store import open_store

    if severity not in _WORDS:
        raise ConfigError(f"--severity {severity!r} is none of {', '.join(_WORDS)}")
    wanted = frozenset(_WORDS[_WORDS.index(severity) :])
    place = resolve_run(store, run)
    if follow:
        if not isinstance(place, Path):
            raise ConfigError(f"{place} is in an object store; --follow works on a run of this machine")
        open_store(place)
        _follow(place, wanted, as_json=as_json)
        return
    found = [one for one in open_store(place).alerts if one.severity in wanted]
    if as_json:
        print_json([plain_alert(one) for one in found])
    elif not found:
        note(f"no alerts in {place}")
    else:
        print_columns(_columns(found), wide=wide, colours=[_COLOURS[one.severity] for one in found])


def _follow(run: Path, wanted: frozenset[str], *, as_json: bool) -> None:
    from capd.live.alerts import NewestAlerts

    newest, said = NewestAlerts(run), ""
    while True:
        newest.look()
        new = [one for one in newest.fresh if one.severity in wanted]
        if as_json:
            lines = [msgspec.json.encode(one).decode() for one in new]
        else:
            lines = [f"{_when(one)} {one.severity:8} {printable(one.text)}" for one in new]
        if lines:
            print_lines(lines)
        problem = (
            f"{run} was removed; waiting for a new run of its name" if newest.is_gone else newest.problem
        )
        if problem and problem != said:
            note(printable(problem))
        said = problem
        time.sleep(_LOOK_S)


def plain_alert(alert: Alert) -> dict[str, Any]:
    """Return an alert as JSON."""
    return msgspec.structs.asdict(alert)


def _columns(found: Sequence[Alert]) -> list[Column]:
    return [
        Column("when", [_when(one) for one in found], spare=3),
        Column("severity", [one.severity for one in found], spare=2),
        Column("rule", [printable(one.rule) for one in found]),
        Column("rank", [str(one.rank) for one in found], right=True),
        Column("iteration", [str(one.iteration) for one in found], right=True),
        Column("metric", [printable(one.metric) for one in found], spare=1),
        Column("value", [_number(one.value) for one in found], right=True),
        Column("limit", [_number(one.limit) for one in found], right=True, spare=4),
        Column("series", [str(one.count) for one in found], right=True),
        Column("first series", [printable(one.series) or "-" for one in found], is_name=True),
    ]


def _when(alert: Alert) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(alert.time_ns / 1e9))


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
