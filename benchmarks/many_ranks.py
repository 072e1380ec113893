"""The cost of many ranks on one node for the daemon, and whether it accepts all of them when they start at once.

    python benchmarks/many_ranks.py [--ranks 32] [--seconds 8] [--rounds 3] [--json FILE]

"trickle": every rank is a separate process that captures 4 KiB each 5 ms, under policy block. The daemon's CPU time,
user and system, is divided by the records. It includes the time until the last record is acknowledged. "connections"
are the threads that came with the ranks, "pipeline" all others. `capture()` is timed in the ranks.

"start": ranks that have imported torch create their sessions at the same moment and capture each 0.1 s. Meanwhile
one process per core computes without a pause. For each rank the time from its first capture to the daemon's WELCOME
is measured, and its connections are counted. More than one connection is a handshake that timed out.

must: 80 microseconds of the daemon's CPU per record, no second connection.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import capd_client
import capd_client.api
from benchmarks.kit.common import daemon, machine, percentile, report

# The forking process has imported torch and has no session yet.
FORK = multiprocessing.get_context("fork")
NBYTES = 4 << 10
PERIOD_S = 0.005
# The time between two captures of a rank that has just started.
STEP_S = 0.1
ARENA_NBYTES = 64 << 20
# The captures of a rank before the daemon's time is measured.
WARM_UP = 200
TIMEOUT_S = 120.0
MUST_US = 80.0

Row = dict[str, Any]


class Ranks:
    """Forked processes, each with a pipe. They report their state and continue on a message."""

    def __init__(self, count: int, work: Any, **arguments: Any) -> None:
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = FORK.Pipe()
            process = FORK.Process(
                target=_rank, args=(rank, count, work, theirs), kwargs=arguments, daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def hear(self) -> list[Any]:
        """Return one message of every rank. Ends the benchmark if one does not come."""
        found = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_S):
                raise SystemExit(f"rank {rank} says nothing")
            found.append(pipe.recv())
        return found

    def tell(self) -> None:
        """Let all ranks continue."""
        for pipe in self._pipes:
            pipe.send(None)

    def join(self) -> None:
        """Wait until all ranks have ended."""
        for process in self._processes:
            process.join(TIMEOUT_S)


def _rank(rank: int, count: int, work: Any, pipe: Connection, **arguments: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count)
    )
    work(pipe, **arguments)
    capd_client.close()


def _capture(tensor: torch.Tensor, iteration: int) -> None:
    capd_client.capture(tensor, tensor_name="x", layer_type="linear", component="linear", iteration=iteration)


def trickle(pipe: Connection, *, seconds: float) -> None:
    """Run a rank that captures a little all the time."""
    tensor = torch.randn(NBYTES // 4)
    _captures(tensor, 0, WARM_UP)
    capd_client.flush(TIMEOUT_S)
    pipe.send(None)
    pipe.recv()
    began = time.monotonic()
    times = _captures(tensor, WARM_UP, int(seconds / PERIOD_S))
    took_s = time.monotonic() - began
    capd_client.flush(TIMEOUT_S)
    pipe.send(
        {"times": times, "took_s": took_s, "counters": capd_client.counters(), "cpu_s": time.process_time()}
    )
    pipe.recv()


def _captures(tensor: torch.Tensor, first: int, count: int) -> list[float]:
    """Return the seconds of each call. A late call delays the calls after it."""
    times = []
    due = time.monotonic()
    for iteration in range(first, first + count):
        started = time.perf_counter()
        _capture(tensor, iteration)
        times.append(time.perf_counter() - started)
        due = max(due + PERIOD_S, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
    return times


def start(pipe: Connection) -> None:
    """Run a rank that creates its session, and captures while it waits for the daemon."""
    tensor = torch.randn(NBYTES // 4)
    pipe.send(None)
    pipe.recv()
    began = time.monotonic()
    _capture(tensor, 0)
    session: Any = capd_client.api.running()
    iteration = 1
    while session.transport.welcome is None:
        time.sleep(STEP_S)
        _capture(tensor, iteration)
        iteration += 1
    welcome_s = time.monotonic() - began
    pipe.send(None)
    pipe.recv()
    flushed = capd_client.flush(TIMEOUT_S)
    connections = session.transport._connections
    pipe.send({"welcome_s": welcome_s, "connections": connections, "flushed": flushed})
    pipe.recv()


def compute() -> None:
    """Keep a core busy."""
    matrix = torch.randn(128, 128)
    while True:
        matrix = torch.tanh(matrix @ matrix)


def threads_cpu_s(pid: int) -> dict[int, float]:
    """Return the CPU seconds of each thread."""
    spent = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            spent[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            # The thread has just ended.
            continue
    return spent


def measure_trickle(directory: Path | None, ranks: int, seconds: float, arena_nbytes: int) -> Row:
    """Run one round of `trickle`."""
    with daemon(directory, arena_nbytes=arena_nbytes, policy="block") as running:
        own = set(threads_cpu_s(running.pid))
        crowd = Ranks(ranks, trickle, seconds=seconds)
        crowd.hear()
        before = threads_cpu_s(running.pid)
        before_s = process_cpu_s(running.pid)
        crowd.tell()
        told = crowd.hear()
        spent_s = process_cpu_s(running.pid) - before_s
        after = threads_cpu_s(running.pid)
        crowd.tell()
        crowd.join()
    times = [one for row in told for one in row["times"]]
    dropped = sum(sum(row["counters"]["dropped"].values()) for row in told)
    by_thread = {tid: spent - before.get(tid, 0.0) for tid, spent in after.items()}
    pipeline_s = sum(spent for tid, spent in by_thread.items() if tid in own)
    return {
        "records": len(times), "dropped": dropped,
        "records_per_s": sum(len(row["times"]) / row["took_s"] for row in told),
        "daemon_us": spent_s / len(times) * 1e6, "pipeline_us": pipeline_s / len(times) * 1e6,
        "connections_us": (sum(by_thread.values()) - pipeline_s) / len(times) * 1e6,
        "rank_us": sum(row["cpu_s"] for row in told) / (len(times) + ranks * WARM_UP) * 1e6,
        "p50_us": percentile(times, 50) * 1e6, "p99_us": percentile(times, 99) * 1e6,
    }  # fmt: skip


def process_cpu_s(pid: int) -> float:
    """Return the user and system seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_start(directory: Path | None, ranks: int) -> Row:
    """Run one round of `start`."""
    with daemon(directory, arena_nbytes=ARENA_NBYTES) as running:
        crowd = Ranks(ranks, start)
        crowd.hear()
        busy = [FORK.Process(target=compute, daemon=True) for _ in os.sched_getaffinity(0)]
        for process in busy:
            process.start()
        before_s = process_cpu_s(running.pid)
        crowd.tell()
        crowd.hear()
        spent_s = process_cpu_s(running.pid) - before_s
        for process in busy:
            process.kill()
        crowd.tell()
        told = crowd.hear()
        crowd.tell()
        crowd.join()
    welcome = [row["welcome_s"] for row in told]
    return {
        "welcome_p50_s": percentile(welcome, 50), "welcome_max_s": max(welcome),
        "retries": sum(row["connections"] - 1 for row in told), "daemon_ms": spent_s / ranks * 1e3,
        "flushed": sum(row["flushed"] for row in told),
    }  # fmt: skip


def show(kind: str, rows: list[Row]) -> Row:
    """Print the medians of the rounds, and return them."""
    row = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    cells = [f"{name} {value:{',.3g' if value < 1000 else ',.0f'}}" for name, value in row.items()]
    print(f"{kind}: {', '.join(cells)}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=32, help="that trickle; twice as many start at once")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arena", type=int, default=ARENA_NBYTES)
    parser.add_argument("--only", choices=("trickle", "start"))
    parser.add_argument(
        "--directory", type=Path, help="where the temporary store goes (default: the system's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    result: Row = {"machine": machine()}
    torch.set_num_threads(1)
    if args.only != "start":
        rows = [
            measure_trickle(args.directory, args.ranks, args.seconds, args.arena) for _ in range(args.rounds)
        ]
        result["trickle"] = rows
        row = show(f"{args.ranks} ranks trickle", rows)
        print(f"daemon CPU per record: {row['daemon_us']:.0f} us, bound {MUST_US:.0f}")
    if args.only != "trickle":
        rows = [measure_start(args.directory, 2 * args.ranks) for _ in range(args.rounds)]
        result["start"] = rows
        show(f"{2 * args.ranks} ranks start at once", rows)
    report(result, args.json)


if __name__ == "__main__":
    main()
