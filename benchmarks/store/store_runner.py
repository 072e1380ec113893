"""The runner of the store's benchmarks: a separate process for every measurement, meters, rounds, tables.

A benchmark names a function of one of the modules here. `child` runs it in a fresh interpreter, so that no engine
finds another one's threads, caches or allocator state. The function returns a flat dict of numbers. `interleave`
repeats all variants in rounds, and every comparison is a ratio of medians within one run.

CPU time is user and system time of the whole process. On a shared machine it says more than wall time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = [
    "MIB", "Meter", "child", "file_nbytes", "interleave", "machine", "medians", "memory_directory",
    "options", "report", "table", "verdict", "work_directory",
]  # fmt: skip

MIB = 1 << 20
PACKAGES = ("numpy", "numcodecs", "zarr", "tensorstore", "zarrs")
CHILD_TIMEOUT_S = 1800.0

Row = dict[str, Any]


class Meter:
    """A meter of a `with` block: wall and CPU seconds of the process, and the bytes of its write and read calls."""

    wall_s = cpu_s = written_nbytes = read_nbytes = 0.0

    def __enter__(self) -> Meter:
        self._start = self._now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        spent = [after - before for before, after in zip(self._start, self._now(), strict=True)]
        self.wall_s, self.cpu_s, self.written_nbytes, self.read_nbytes = spent

    @staticmethod
    def _now() -> tuple[float, float, int, int]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        cpu = usage.ru_utime + usage.ru_stime
        return time.perf_counter(), cpu, int(counts["wchar"]), int(counts["rchar"])

    def row(self, **more: Any) -> Row:
        """Return the four numbers, with the caller's own."""
        numbers = {name: getattr(self, name) for name in ("wall_s", "cpu_s", "written_nbytes", "read_nbytes")}
        return {**numbers, **more}


def child(function: str, **arguments: Any) -> Row:
    """Call "module:function" with keyword arguments (JSON values) in a fresh interpreter. Returns its result."""
    done = subprocess.run(
        [sys.executable, __file__, function],
        input=json.dumps(arguments, default=str),
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{function} failed with {arguments}:\n{done.stderr}")
    result: Row = json.loads(done.stdout.splitlines()[-1])
    return result


def interleave(variants: Mapping[str, Callable[[], Row]], rounds: int) -> dict[str, list[Row]]:
    """Run every variant once per round. Each round begins with another variant."""
    names, rows = list(variants), {name: [] for name in variants}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            rows[name].append(variants[name]())
            if sys.stderr.isatty():
                print(f"\r\033[Kround {number + 1} of {rounds}: {name}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return rows


def medians(rows: Sequence[Row]) -> Row:
    """Return each number's median over the rounds. For other values, return the first round's."""
    first = rows[0]
    return {
        name: statistics.median(row[name] for row in rows) if isinstance(value, int | float) else value
        for name, value in first.items()
    }


def options(description: str, *, rounds: int, directory: Path | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options of every store benchmark."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="repetitions of every variant")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, not how fast")
    place = directory or tempfile.gettempdir()
    parser.add_argument("--directory", type=Path, default=place, help=f"of the temporary files ({place})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    return parser


def memory_directory() -> Path:
    """Return a directory in memory, so that the disk is not measured.

    If there is none, return the temporary directory.
    """
    place = Path("/dev/shm")  # noqa: S108 - a default for benchmark files, which are made by mkdtemp
    return place if os.access(place, os.W_OK) else Path(tempfile.gettempdir())


@contextlib.contextmanager
def work_directory(parent: Path) -> Iterator[Path]:
    """Create a temporary directory below `parent`."""
    directory = Path(tempfile.mkdtemp(prefix="capd-benchmark-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def file_nbytes(directory: Path, pattern: str = "**/*") -> int:
    """Return the sum of the sizes of the matching files in `directory`."""
    return sum(path.stat().st_size for path in directory.glob(pattern) if path.is_file())


def machine() -> Row:
    """Return the facts that a reader of a result needs."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in cpuinfo if line.startswith("model name")]
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "cpu": models[0] if models else platform.machine(), "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0], "python": platform.python_version(), **versions,
    }  # fmt: skip


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print columns as wide as necessary. The first one is text, and numbers have three significant digits."""
    cells = [[_text(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    for line in (list(head), *cells):
        first, *others = (f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]))
    print()


def _text(cell: object) -> str:
    if not isinstance(cell, float):
        return "" if cell is None else str(cell)
    return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.3g}"


def verdict(what: str, value: float, bound: float, *, at_most: bool = False) -> Row:
    """Print one bound and whether it is met. Returns it for the report."""
    met = value <= bound if at_most else value >= bound
    print(f"{what}: {value:.4g}, must be {'<=' if at_most else '>='} {bound:g}: {'met' if met else 'MISSED'}")
    return {"what": what, "value": value, "bound": bound, "at_most": at_most, "met": met}


def report(result: Row, path: Path | None) -> None:
    """Write the whole result as JSON if `--json FILE` was given."""
    print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")


def _main() -> None:
    module, _, name = sys.argv[1].partition(":")
    arguments = json.loads(sys.stdin.read())
    result = getattr(importlib.import_module(module), name)(**arguments)
    print(json.dumps(result))


if __name__ == "__main__":
    _main()
