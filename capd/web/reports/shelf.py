"""The reports of the page: one at a time is made, and the newest stay in a private directory until the page ends."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from capd.errors import CapdError, ConfigError, NotAStore, StoreBusy
from capd.lifecycle.inventory import look_at
from capd.web.reading.catalogs import Runs
from capd.web.reports.process import ReportProcess
from capd.web.reports.stamps import Stamp, is_finished, stamp_of

__all__ = ["KINDS", "ReportShelf"]

logger = logging.getLogger(__name__)

KINDS = ("quick", "full")
"""The kinds of report: of stored statistics, or of every element."""

_MOST_KEPT = 8
_MOST_NBYTES = 128 << 20
_MOST_FAILED = 64
_LIMIT_S = 3600.0
# A report of a run that changes meanwhile is made again.
_TRIES = 2
_DAMAGE_CODE = 4
# By this the command names the limit of its file, which only the page has set.
_FILE_LIMIT = "ulimit -f"

_Name = tuple[Path, str]


@dataclass(frozen=True, slots=True)
class _KeptReport:
    """A report in a directory of its own. note: what it leaves out."""

    stamp: Stamp
    path: Path
    nbytes: int
    note: str


@dataclass(slots=True)
class _Making:
    """The report that is made now. stopped: set if somebody has asked for its end."""

    name: _Name
    stamp: Stamp
    began: float
    process: ReportProcess | None = None
    stopped: threading.Event = field(default_factory=threading.Event)


class ReportShelf:
    """Makes reports, and keeps the newest. Thread-safe."""

    def __init__(
        self,
        runs: Runs,
        *,
        most_kept: int = _MOST_KEPT,
        most_nbytes: int = _MOST_NBYTES,
        limit_s: float = _LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing yet.

        Args:
            runs: The runs of the page.
            most_kept: The most reports that are kept.
            most_nbytes: The most bytes of all together, and of one.
            limit_s: The time that a report may take.
            clock: Tells the time since a report began.
        """
        self._runs, self._clock = runs, clock
        self._most_kept, self._most_nbytes, self._limit_s = most_kept, most_nbytes, limit_s
        self._lock = threading.Lock()
        self._directory: Path | None = None
        self._kept: OrderedDict[_Name, _KeptReport] = OrderedDict()
        self._failed: OrderedDict[_Name, tuple[Stamp, str]] = OrderedDict()
        self._making: _Making | None = None
        self._thread: threading.Thread | None = None
        self._ended = False

    def look(self, run: str) -> dict[str, Any]:
        """Return whether a run is finished, and the state of its reports by kind.

        Raises:
            NotAStore: There is no such run.
            CapdError: It cannot be read.
        """
        path, stamp = self._found(run)
        facts = look_at(path)
        with self._lock:
            return {
                "is_finished": is_finished(facts),
                "problem": facts.problem if facts.state == "unreadable" else "",
                "kinds": {kind: self._state((path, kind), stamp) for kind in KINDS},
            }

    def make(self, run: str, kind: str) -> None:
        """Begin a report, unless it is there or being made.

        Raises:
            ConfigError: There is no such kind.
            NotAStore: There is no such run.
            StoreBusy: The run is not finished, or another report is being made.
            CapdError: The run cannot be read, or the page ends.
        """
        if kind not in KINDS:
            raise ConfigError(f"kind={kind!r} is none of {', '.join(KINDS)}")
        path, stamp = self._found(run)
        facts = look_at(path)
        if not is_finished(facts):
            raise StoreBusy(
                f"{path.name} has no report now ({facts.problem or facts.state}); make it when the run has finished"
            )
        name = (path, kind)
        with self._lock:
            if self._ended:
                raise CapdError("the page ends; start `capd web` again")
            if self._current(name, stamp) is not None:
                return
            if self._making is not None:
                if self._making.name == name:
                    return
                other, its_kind = self._making.name
                raise StoreBusy(
                    f"the {its_kind} report of {other.name} is being made, one at a time; try again after it"
                )
            # What was wrong, or has changed, is told until this begins.
            self._failed.pop(name, None)
            making = self._making = _Making(name, stamp, self._clock())
            # A process ends with the thread that has started it, so each report has a thread of its own.
            self._thread = threading.Thread(
                target=self._run, args=(making,), name="capd-web-report", daemon=True
            )
            self._thread.start()

    def stop(self, run: str) -> None:
        """End the report of a run that is being made; without one, do nothing."""
        path, _ = self._found(run)
        with self._lock:
            making = self._making
            if making is None or making.name[0] != path:
                return
            making.stopped.set()
            if making.process is not None:
                making.process.kill()

    def opened(self, run: str, kind: str) -> tuple[BinaryIO, int]:
        """Return the file of a report and its size. The caller closes it.

        Raises:
            NotAStore: There is no such run or report, or the run has changed since.
            CapdError: The run cannot be read.
        """
        path, stamp = self._found(run)
        with self._lock:
            found = self._current((path, kind), stamp)
            if found is None:
                raise NotAStore(
                    f"there is no {kind} report of {path.name} as it is now; make it on the run's page"
                )
            self._kept.move_to_end((path, kind))
            try:
                return found.path.open("rb"), found.nbytes
            except OSError as error:
                self._drop((path, kind))
                raise NotAStore(
                    f"the {kind} report of {path.name} was removed; make it on the run's page again"
                ) from error

    def close(self) -> None:
        """End the process and remove all reports."""
        with self._lock:
            self._ended = True
            making, thread = self._making, self._thread
            if making is not None and making.process is not None:
                making.process.kill()
        if thread is not None:
            thread.join()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _found(self, run: str) -> tuple[Path, Stamp]:
        path = self._runs.run(run).path.absolute()
        return path, stamp_of(path)

    def _state(self, name: _Name, stamp: Stamp) -> dict[str, Any]:
        if self._making is not None and self._making.name == name:
            return {"state": "making", "seconds": self._clock() - self._making.began}
        found = self._current(name, stamp)
        if found is not None:
            return {"state": "ready", "nbytes": found.nbytes, "note": found.note}
        failed = self._failed.get(name)
        if failed is not None and failed[0] == stamp:
            return {"state": "failed", "problem": failed[1]}
        return {"state": "none"}

    def _current(self, name: _Name, stamp: Stamp) -> _KeptReport | None:
        """Return the report, unless the run has changed since: it is dropped then."""
        found = self._kept.get(name)
        if found is not None and found.stamp != stamp:
            self._drop(name)
            self._fail(name, stamp, "the run has changed since this report was made; make it again")
            return None
        return found

    def _drop(self, name: _Name) -> None:
        # Whoever reads it has it open, and reads on.
        shutil.rmtree(self._kept.pop(name).path.parent, ignore_errors=True)

    def _run(self, making: _Making) -> None:
        kept, problem = None, ""
        try:
            kept, problem = self._made_at_rest(making)
        except OSError as error:
            problem = f"the report cannot be written: {(error.strerror or str(error)).lower()}"
        except CapdError as error:
            problem = str(error)
        except Exception as error:
            # This is the outermost loop of the thread.
            logger.exception("a report failed")
            problem = f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._making = None
                self._keep(making, kept, problem)

    def _made_at_rest(self, making: _Making) -> tuple[_KeptReport | None, str]:
        """Make the report, once more if the run changed meanwhile: a daemon notes the end of a seal after the seal."""
        run = making.name[0]
        for left in reversed(range(_TRIES)):
            making.stamp = stamp_of(run)
            kept, problem = self._made(making)
            if kept is None or not left or stamp_of(run) == making.stamp:
                break
            shutil.rmtree(kept.path.parent, ignore_errors=True)
        return kept, problem

    def _made(self, making: _Making) -> tuple[_KeptReport | None, str]:
        run, kind = making.name
        with self._lock:
            if self._directory is None:
                self._directory = Path(tempfile.mkdtemp(prefix="capd-web-"))
        place = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=self._directory))
        kept = None
        try:
            page = place / "report.html"
            with self._lock:
                if self._ended or making.stopped.is_set():
                    return None, ""
                making.process = ReportProcess(
                    run, page, is_quick=kind == "quick", most_nbytes=self._most_nbytes
                )
            code, line = making.process.wait(self._limit_s)
            if making.stopped.is_set():
                return None, ""
            if code not in (0, _DAMAGE_CODE) or not page.is_file():
                return None, self._why(code, line)
            note = line if code == _DAMAGE_CODE else ""
            kept = _KeptReport(making.stamp, page, page.stat().st_size, note)
            return kept, ""
        finally:
            if kept is None:
                shutil.rmtree(place, ignore_errors=True)

    def _why(self, code: int | None, line: str) -> str:
        if code is None:
            return f"the report took longer than {self._limit_s / 60:g} min; write it with the command below"
        if _FILE_LIMIT in line:
            return f"the report is larger than {self._most_nbytes >> 20} MiB; write it with the command below"
        return line or f"`capd report` ended with {code} and said nothing; try the command below"

    def _keep(self, making: _Making, kept: _KeptReport | None, problem: str) -> None:
        if kept is None:
            if problem:
                self._fail(making.name, making.stamp, problem)
            return
        if making.name in self._kept:
            self._drop(making.name)
        self._kept[making.name] = kept
        while len(self._kept) > 1 and (
            len(self._kept) > self._most_kept or self._nbytes() > self._most_nbytes
        ):
            self._drop(next(iter(self._kept)))

    def _fail(self, name: _Name, stamp: Stamp, problem: str) -> None:
        self._failed[name] = (stamp, problem)
        while len(self._failed) > _MOST_FAILED:
            self._failed.popitem(last=False)

    def _nbytes(self) -> int:
        return sum(one.nbytes for one in self._kept.values())
