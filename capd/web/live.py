"""The live state for all viewers together: one sample of the daemon a second, and the newest records of its runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from capd.live.alerts import NewestAlerts
from capd.live.records import NewestRecords, NewRecord
from capd.live.sampler import Sampler
from capd.live.state import LiveSample, RunState
from capd.store.format.dtypes import is_statistics, stored_type
from capd.strict_json import strict_json
from capd.web.reading.alerts import live_alerts
from capd.web.reading.catalogs import Runs

__all__ = ["LiveView"]

_MAX_NEWEST = 200
# The runs whose newest records are listed.
_MAX_FOLLOWED = 4
_MAX_EVENTS = 50


class LiveView:
    """Samples one daemon for the runs of this page. Not thread-safe."""

    def __init__(self, runs: Runs, endpoint: Path) -> None:
        """Connect at the first sample.

        Args:
            runs: The runs of the page. Others of the daemon are not shown.
            endpoint: The path of the daemon's socket.
        """
        self._runs, self._sampler = runs, Sampler(endpoint)
        self._followed: dict[tuple[Path, str], NewestRecords] = {}
        self._alerts: dict[Path, NewestAlerts] = {}

    def sample(self) -> str:
        """Return the state as one line of JSON. Without a daemon it has the last values and the problem."""
        found = self._sampler.sample()
        shown = [run for run in found.node.runs if self._is_here(run)] if found.node is not None else []
        state = {
            "time_ns": str(found.time_ns),
            "daemon": _daemon_state(found, shown),
            "problem": found.problem,
            "silent_s": found.silent_s,
            "node": None if found.node is None or not shown else self._node(found, shown),
            "newest": self._newest(found, shown),
            "alerts": {_name(run): live_alerts(self._alerts_of(Path(run.path))) for run in _followed(shown)},
            "events": [
                {**asdict(event), "time_ns": str(event.time_ns)}
                for event in self._sampler.events[-_MAX_EVENTS:]
                if shown and event.run in ("", *(run.run_id for run in shown))
            ],
        }
        return json.dumps(strict_json(state), default=_plain, allow_nan=False, separators=(",", ":"))

    def close(self) -> None:
        """Close the connection to the daemon."""
        self._sampler.close()

    def _is_here(self, run: RunState) -> bool:
        path = os.path.realpath(run.path)
        return any(os.path.realpath(one) == path for one in self._runs.paths())

    def _node(self, found: LiveSample, shown: list[RunState]) -> dict[str, Any]:
        assert found.node is not None  # noqa: S101 - the caller has asked
        plain = asdict(found.node)
        plain["runs"] = [
            {
                **asdict(run), "name": _name(run), "live": run.live, "iteration": run.iteration,
                "arena": list(run.arena),
                "rates": self._sampler.rates(run.run_id),
                "rank_rates": [self._sampler.rates(run.run_id, rank.client) for rank in run.ranks],
            }
            for run in shown
        ]  # fmt: skip
        return plain

    def _alerts_of(self, run: Path) -> NewestAlerts:
        found = self._alerts.get(run)
        if found is None:
            while len(self._alerts) >= _MAX_FOLLOWED:
                del self._alerts[next(iter(self._alerts))]
            found = self._alerts[run] = NewestAlerts(run)
        return found

    def _newest(self, found: LiveSample, shown: list[RunState]) -> dict[str, Any]:
        """Return the newest records of the runs that somebody writes, by the run's name."""
        assert found.node is not None or not shown  # noqa: S101
        node = found.node.node if found.node is not None else ""
        places = {(Path(run.path), node): run for run in _followed(shown)}
        self._followed = {
            place: self._followed.get(place) or NewestRecords(*place, limit=_MAX_NEWEST) for place in places
        }
        return {
            _name(run): {
                "records": [_record(one) for one in self._followed[place].look()],
                "left_out": self._followed[place].left_out,
                "problem": self._followed[place].problem,
            }
            for place, run in places.items()
        }


def _followed(shown: list[RunState]) -> list[RunState]:
    """Return the runs that somebody writes; without one, the newest."""
    return [run for run in shown if run.live][-_MAX_FOLLOWED:] or shown[-1:]


def _daemon_state(found: LiveSample, shown: list[RunState]) -> str:
    if found.node is None:
        return "none"
    if found.gone:
        return "gone"
    return "live" if shown else "elsewhere"


def _name(run: RunState) -> str:
    return Path(run.path).name.removesuffix(".zarr")


def _record(record: NewRecord) -> Mapping[str, Any]:
    stats = record.stats
    dtype = "statistics" if is_statistics(record.dtype) else stored_type(record.dtype).torch
    return {
        "path": record.path, "number": record.number, "dtype": dtype, "shape": list(record.shape),
        "rank": record.key.rank, "layer": record.key.layer, "tensor_name": record.key.tensor_name,
        "module": record.key.module, "operation": record.key.operation, "quant_type": record.key.quant_type,
        "iteration": record.moment.iteration, "micro_batch": record.moment.micro_batch,
        "time_ns": str(record.moment.time_ns),
        **{name: getattr(stats, name, None) for name in ("absmax", "mean", "std", "nan", "inf")},
    }  # fmt: skip


def _plain(value: Any) -> Any:
    return value.model_dump()
