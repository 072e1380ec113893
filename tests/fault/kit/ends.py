"""Ends of ranks in every way, and what must hold after each: seen from outside, by what each had noted before."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

from tests.kit.checking import assert_balanced, captured_numbers
from tests.kit.processes import Daemon, Rank, at_rest, live_stats, until

NURSERY = str(Path(__file__).with_name("nursery.py"))
AT_ONCE = 4
FOR_EVER = 10**9
ENDED_BY = {"exit": 0, "abort": -signal.SIGABRT, "kill": -signal.SIGKILL, "memory": -signal.SIGKILL}


def end_ranks(
    daemon: Daemon, folder: Path, generator: random.Random, ends: int, group: Path | None = None
) -> dict[str, int]:
    """Start ranks 0 … ends-1, a few at a time, and have each end; then judge the store. Returns figures.

    group: a memory cgroup in which some of them run out of memory.
    """
    hows = [*ENDED_BY] if group else [how for how in ENDED_BY if how != "memory"]
    weights = [2, 1, 5, 1][: len(hows)]
    nursery = Rank(daemon.endpoint, command=(sys.executable, NURSERY), CAPD_ARENA_BYTES=str(8 << 20))
    counted: Counter[str] = Counter()
    try:
        for first in range(0, ends, AT_ONCE):
            started = {}
            for rank in range(first, min(first + AT_ONCE, ends)):
                how = generator.choices(hows, weights)[0]
                counted[how] += 1
                count = FOR_EVER if how == "kill" else generator.randrange(120)
                inside = str(group) if how == "memory" else ""
                job = ["start", rank, count, how, str(folder / str(rank)), inside]
                started[nursery.ask(json.dumps(job))] = how
            for pid, how in started.items():
                if how == "kill":
                    threading.Event().wait(generator.uniform(0.0, 0.1))
                    os.kill(pid, signal.SIGKILL)
            for pid, how in started.items():
                assert nursery.ask(json.dumps(["wait", pid])) == ENDED_BY[how]
        until(lambda: all(map(at_rest, live_stats(daemon.endpoint)["sessions"])), 120)
    finally:
        nursery.kill()
    stats = live_stats(daemon.endpoint)
    # Hundreds of series: a busy machine may need longer for them than a shutdown has.
    subprocess.run([sys.executable, "-m", "capd", "ctl", "seal", "--endpoint", daemon.endpoint], check=True)
    daemon.stop()
    return {**counted, **_judge(daemon, folder, ends, stats)}


def _judge(daemon: Daemon, folder: Path, ends: int, stats: dict[str, object]) -> dict[str, int]:
    """Every capture that had returned is there, once and bit for bit; besides, at most the one that was not noted."""
    assert_balanced(stats)
    sessions = {session["rank"]: session for session in stats["sessions"]}  # type: ignore[attr-defined]
    total = 0
    for rank in range(ends):
        path = folder / str(rank)
        returned = [int(line) for line in path.read_text().splitlines()] if path.exists() else []
        if rank not in sessions:
            assert not returned
            continue
        kept, session = captured_numbers(daemon.store / "run.zarr", rank), sessions[rank]
        assert kept[: len(returned)] == returned
        assert len(kept) <= len(returned) + 1
        assert set(session["dropped"]) <= {"rank_died"}, session
        assert session["offered"] - len(kept) <= 1
        total += len(kept)
    return {"kept": total, "half_copied": stats["dropped"].get("rank_died", 0)}  # type: ignore[attr-defined]
