"""The samples of SQNR: of the tensors that somebody looks at, one record each two seconds is decoded and measured.

The tensors take turns. Results are kept by record, so a record is decoded once.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capd.store.format.dtypes import is_statistics, stored_type
from capd.web.reading.catalogs import SeriesPlace

__all__ = ["MAX_RECORD_NBYTES", "PERIOD_S", "Samples"]

MAX_RECORD_NBYTES = 16 << 20
PERIOD_S = 2.0
_MAX_SAMPLES = 64
_MAX_TENSORS = 256
# The page asks every few seconds while it shows a tensor.
_WANTED_S = 15.0
_IDLE_S = 30.0
_STORED_S = 60
_FLOATS = ("bfloat16", "float16", "float32", "float64")


@dataclass(slots=True)
class _Tensor:
    run: Path
    node: str
    path: str
    records: int
    wanted_until: float
    # By record number.
    found: dict[int, dict[str, Any]] = field(default_factory=dict)
    problem: str = ""

    def next_number(self) -> int | None:
        """Return the next record to measure: the newest, then ever finer parts of all. None if it is enough."""
        if len(self.found) >= min(_MAX_SAMPLES, self.records):
            return None
        return next((one for one in _spread(self.records) if one not in self.found), None)


class Samples:
    """Measures records in a process of its own. A thread feeds it while tensors are wanted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start nothing yet."""
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._tensors: OrderedDict[tuple[Path, str, str], _Tensor] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        # Processes that read stored errors.
        self._reading: set[subprocess.Popen[str]] = set()
        self._ended = False

    def stored(self, run: Path, places: Sequence[SeriesPlace]) -> dict[str, Any]:
        """Return the errors by iteration that were measured while capturing, read by a process that ends after it.

        Args:
            run: The run.
            places: The series with errors of one tensor.
        """
        if not places:
            return {"iteration": [], "formats": {}, "problem": ""}
        with self._lock:
            if self._ended:
                return {"problem": "the page ends"}
            process = _started()
            self._reading.add(process)
        wanted = [(place.node, place.row.header.path) for place in places]
        request = json.dumps({"run": str(run.absolute()), "errors": wanted})
        try:
            answer = json.loads(process.communicate(f"{request}\n", _STORED_S)[0])
        except subprocess.TimeoutExpired:
            return {
                "problem": f"the errors were not read within {_STORED_S} s; `capd compare --lab` prints them"
            }
        except (OSError, ValueError):
            return {"problem": f"the reading process ended ({process.poll()})"}
        finally:
            _end(process)
            with self._lock:
                self._reading.discard(process)
        return answer if isinstance(answer, dict) else {"problem": "no answer"}

    def look(self, run: Path, place: SeriesPlace, nbytes: int) -> dict[str, Any]:
        """Return the samples of a tensor so far, and ask for more of them.

        Args:
            run: The run.
            place: The series.
            nbytes: The bytes of its largest record.
        """
        row = place.row
        why = _why_not(row.header.dtype, nbytes)
        if why:
            return {"records": row.records, "samples": [], "problem": why, "is_complete": True}
        with self._lock:
            key = (run, place.node, row.header.path)
            tensor = self._tensors.get(key)
            until = self._clock() + _WANTED_S
            if tensor is None:
                tensor = self._tensors[key] = _Tensor(run, place.node, row.header.path, row.records, until)
                while len(self._tensors) > _MAX_TENSORS:
                    self._tensors.popitem(last=False)
            tensor.records, tensor.wanted_until = row.records, until
            if tensor.next_number() is not None and not tensor.problem:
                self._begin()
            return {
                "records": tensor.records,
                "samples": [{"number": number, **sqnr} for number, sqnr in sorted(tensor.found.items())],
                "problem": tensor.problem,
                "is_complete": bool(tensor.problem) or tensor.next_number() is None,
            }

    def close(self) -> None:
        """End the processes. What they read is given up."""
        with self._lock:
            self._ended = True
            self._changed.notify_all()
            thread = self._thread
            processes = [*self._reading, *([] if self._process is None else [self._process])]
        for process in processes:
            process.kill()
        if thread is not None:
            thread.join()

    def _begin(self) -> None:
        if self._thread is None and not self._ended:
            self._thread = threading.Thread(target=self._run, name="capd-web-samples", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        idle_since = self._clock()
        try:
            while True:
                with self._lock:
                    if self._ended or self._clock() - idle_since > _IDLE_S:
                        break
                    turn = self._next()
                if turn is None:
                    self._wait(PERIOD_S)
                    continue
                began = idle_since = self._clock()
                self._measure(*turn)
                self._wait(max(0.0, began + PERIOD_S - self._clock()))
        finally:
            with self._lock:
                self._thread = None
                process, self._process = self._process, None
            if process is not None:
                _end(process)

    def _wait(self, seconds: float) -> None:
        until = self._clock() + seconds
        with self._lock:
            while not self._ended and (left := until - self._clock()) > 0:
                self._changed.wait(left)

    def _next(self) -> tuple[_Tensor, int] | None:
        """Return the wanted tensor that waits longest, and its next record."""
        now = self._clock()
        for key, tensor in self._tensors.items():
            if tensor.wanted_until < now or tensor.problem:
                continue
            number = tensor.next_number()
            if number is not None:
                self._tensors.move_to_end(key)
                return tensor, number
        return None

    def _measure(self, tensor: _Tensor, number: int) -> None:
        answer = self._ask(
            {"run": str(tensor.run.absolute()), "node": tensor.node, "path": tensor.path, "number": number}
        )
        with self._lock:
            if "sqnr" in answer:
                tensor.found[number] = {"sqnr": answer["sqnr"]}
            elif not self._ended:
                tensor.found[number] = {"problem": str(answer.get("problem", "no answer"))}
                # A tensor that cannot be measured at all is not tried record by record.
                tensor.problem = tensor.found[number]["problem"] if len(tensor.found) == 1 else ""

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if self._ended:
                return {}
            if self._process is None or self._process.poll() is not None:
                self._process = _started()
            process = self._process
        assert process.stdin is not None  # noqa: S101 - both are pipes
        assert process.stdout is not None  # noqa: S101
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
        except (OSError, ValueError):
            _end(process)
            return {"problem": f"the measuring process ended ({process.returncode})"}
        return answer if isinstance(answer, dict) else {}


def _started() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "capd.web.sampler"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()


def _why_not(dtype: str, nbytes: int) -> str:
    if is_statistics(dtype):
        return "only statistics were kept, no elements"
    if stored_type(dtype).torch not in _FLOATS:
        return f"{stored_type(dtype).torch} is of low precision already"
    if nbytes > MAX_RECORD_NBYTES:
        return f"its records are larger than {MAX_RECORD_NBYTES >> 20} MiB; `capd compare` measures them"
    return ""


def _spread(count: int) -> Iterator[int]:
    """Yield the numbers below `count`: the last, the first, then the middles of what lies between, over and over."""
    yield count - 1
    yield 0
    parts = 2
    while parts < 2 * count:
        yield from ((count - 1) * odd // parts for odd in range(1, parts, 2))
        parts *= 2
    yield from range(count)
