"""The answers of the page as plain data: each is a function of the runs and of what an address asks."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.datastructures import QueryParams

from capd.errors import CapdError, ConfigError
from capd.lifecycle.inventory import look_at
from capd.rules.ranges import FORMAT_RANGES
from capd.store.catalog.search import FIELDS
from capd.web.reading.alerts import newest_alerts
from capd.web.reading.catalogs import Runs, SeriesPlace
from capd.web.reading.layers import STATISTICS, layer_map
from capd.web.reading.lines import describe, tensor_lines
from capd.web.reading.scalars import scalar_lines, scalar_names
from capd.web.sampling import Samples
from capd_client.protocol.dtypes import ITEM_NBYTES

__all__ = ["Answers"]

_MAX_RUNS = 500
_MAX_PAGE = 200
_MAX_OVERLAID = 8
_MAX_WORDS_CHARS = 4096
_NUMBERS = ("rank", "layer")


@dataclass(frozen=True, slots=True)
class Answers:
    """What the page asks of the store. Every method may raise CapdError, whose text the page shows."""

    runs_here: Runs
    samples: Samples

    def runs(self, _: QueryParams) -> dict[str, Any]:
        """Return the newest runs."""
        paths = self.runs_here.paths()
        return {
            "root": str(self.runs_here.root),
            "total": len(paths),
            "runs": [_summary(path) for path in reversed(paths[-_MAX_RUNS:])],
        }

    def run(self, query: QueryParams) -> dict[str, Any]:
        """Return one run: its summary, the values of its key fields, and its scalars."""
        run = self.runs_here.run(_needed(query, "run"))
        return {
            **_summary(run.path),
            "fields": run.values(),
            "scalars": scalar_names(run),
            "statistics": list(STATISTICS),
            "report": f"capd report {shlex.quote(str(run.path))} -o report.html",
        }

    def series(self, query: QueryParams) -> dict[str, Any]:
        """Return one page of the series that match."""
        run = self.runs_here.run(_needed(query, "run"))
        first, most = _number(query, "first", 0), min(_number(query, "most", 100), _MAX_PAGE)
        found = run.search(_words(query), _fields(query), first, most)
        return {"total": found.total, "first": first, "series": [describe(one) for one in found.places]}

    def tensor(self, query: QueryParams) -> dict[str, Any]:
        """Return the statistics of one tensor, in one run or in several."""
        path = _needed(query, "path")
        return {
            "ranges": {
                label: [one.largest, one.normal, one.smallest] for label, one in FORMAT_RANGES.items()
            },
            "runs": self._of_runs(query, lambda name: tensor_lines(self.runs_here.run(name), path)),
        }

    def scalar(self, query: QueryParams) -> dict[str, Any]:
        """Return one scalar of one run or of several."""
        name = _needed(query, "name")
        return {"runs": self._of_runs(query, lambda run: scalar_lines(self.runs_here.run(run), name))}

    def layers(self, query: QueryParams) -> dict[str, Any]:
        """Return a statistic by layer and iteration."""
        run = self.runs_here.run(_needed(query, "run"))
        return layer_map(run, _words(query), _fields(query), query.get("statistic", "absmax"))

    def alerts(self, query: QueryParams) -> dict[str, Any]:
        """Return the newest alerts of a run, or those of one tensor."""
        return newest_alerts(self.runs_here.run(_needed(query, "run")).path, query.get("path"))

    def sqnr(self, query: QueryParams) -> dict[str, Any]:
        """Return the samples of a tensor so far, and ask for more."""
        run = self.runs_here.run(_needed(query, "run"))
        place = max(run.series(_needed(query, "path")), key=lambda one: one.row.records)
        return self.samples.look(run.path, place, _largest_nbytes(place))

    def errors(self, query: QueryParams) -> dict[str, Any]:
        """Return the errors of formats that were measured on a tensor while capturing, by iteration."""
        run = self.runs_here.run(_needed(query, "run"))
        return self.samples.stored(run.path, run.errors(run.series(_needed(query, "path"))))

    def _of_runs(self, query: QueryParams, read: Any) -> list[dict[str, Any]]:
        """Return an answer for each run that is asked for. One that fails has its problem instead."""
        names = list(dict.fromkeys(query.getlist("run")))[:_MAX_OVERLAID]
        if not names:
            raise ConfigError("this address needs run=NAME")
        found = []
        for name in names:
            try:
                found.append({"run": name, **read(name)})
            except CapdError as error:
                if len(names) == 1:
                    raise
                found.append({"run": name, "problem": str(error)})
        return found


def _summary(path: Path) -> dict[str, Any]:
    facts = look_at(path)
    names = (
        "state", "problem", "started_s", "ended_s", "first_iteration", "last_iteration", "records", "raw_bytes",
        "stored_bytes", "quant_types", "ranks", "nodes", "command", "tags", "is_pinned",
    )  # fmt: skip
    return {"name": path.name.removesuffix(".zarr"), **{name: getattr(facts, name) for name in names}}


def _largest_nbytes(place: SeriesPlace) -> int:
    from capd.store.format.dtypes import stored_type

    return math.prod(place.row.max_shape) * ITEM_NBYTES.get(stored_type(place.row.header.dtype).torch, 8)


def _needed(query: QueryParams, name: str) -> str:
    value = query.get(name)
    if not value:
        raise ConfigError(f"this address needs {name}=…")
    return value


def _number(query: QueryParams, name: str, otherwise: int) -> int:
    text = query.get(name)
    if text is None:
        return otherwise
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ConfigError(f"{name}={text!r} is not a whole number")
    return int(text)


def _words(query: QueryParams) -> list[str]:
    return query.get("words", "")[:_MAX_WORDS_CHARS].split()


def _fields(query: QueryParams) -> Mapping[str, str | int]:
    return {
        name: _number(query, name, 0) if name in _NUMBERS else query[name]
        for name in FIELDS
        if query.get(name)
    }
