"""Judges a chaos run from outside: logs, store and counters of `tests.fault.chaos.chaos`, promise by promise.

Asserts what must hold and returns figures. The store is read by the checker, which imports nothing of capd, and
by the command line as a user would.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.fault import check
from tests.fault.chaos.chaos import SCRIPT, Chaos, Life
from tests.fault.chaos.chaos_rank import ATTEMPT
from tests.kit.processes import capd

__all__ = ["judge"]

LONGEST_STEP_S = 60.0  # on a machine that others use as well; what is stated is a second per capture at most
UNCLEAN_S = 8.0  # a rank may have died unseen so long before or after no daemon had the run open
WARNINGS = 12  # kinds of them, each at most every 20 s of the process's life
DAEMON_NBYTES = 512 << 20  # 256 MiB + staging
DAEMON_DESCRIPTORS, DAEMON_THREADS, RANK_THREADS = 256, 64, 16


class Told(NamedTuple):
    """What one attempt of a rank wrote down."""

    life: Life
    lines: list[dict[str, Any]]

    def of(self, operation: str) -> list[dict[str, Any]]:
        """Its lines of one kind."""
        return [line for line in self.lines if line["op"] == operation]


def judge(chaos: Chaos, expected: Path) -> dict[str, float | int | str]:
    """Check P0 to P8 of a run that has ended; returns its figures. `expected` is where the joint log is written."""
    told = [Told(life, list(_lines(life.log))) for life in chaos.lives]
    with expected.open("w") as log:
        for one in told:
            for line in one.of("offer") + one.of("ack"):
                log.write(json.dumps(line) + "\n")
    steps = _training_is_what_it_is_without_capture(told)
    longest = _nothing_waited(told)
    _nothing_was_said_too_often(told)
    report = _store_is_sound(chaos, expected)
    unclean = _accounts_add_up(chaos, told)
    _ledger_names_what_was_dropped(chaos, told)
    _bounds_were_kept(chaos)
    _nothing_is_left(chaos)
    return {
        "faults": sum(chaos.faults.values()),
        "attempts": len(chaos.lives),
        "steps": steps,
        "steps_without_daemon": _steps_without_daemon(chaos, told),
        "longest_step_s": round(longest, 2),
        "offered": report["offered"],
        "acked": report["acked"],
        "found": report["found"],
        "lost": len(report["lost"]),
        "duplicates": len(report["duplicates"]),
        "wrong": len(report["wrong"]),
        "unclean_sessions": unclean,
        "daemon_anon_mib": chaos.daemon_usage.nbytes >> 20,
        "daemon_fds": chaos.daemon_usage.descriptors,
        "daemon_threads": chaos.daemon_usage.threads,
        "rank_threads": chaos.rank_usage.threads,
    }


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line; a rank killed before its first one has no file."""
    if path.exists():
        for line in path.read_bytes().split(b"\n")[:-1]:
            yield json.loads(line)


def _training_is_what_it_is_without_capture(told: list[Told]) -> int:
    """P0: every loss, and so every weight and random number, is that of a process without capture."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "reference"],
        env={**os.environ, "CAPD_ENDPOINT": "off", "PYTHONPATH": str(SCRIPT.parents[3])},
        capture_output=True,
        text=True,
        check=True,
    )
    reference = json.loads(done.stdout)
    steps = 0
    for one in told:
        for line in one.of("step"):
            assert line["loss"] == reference[one.life.rank][line["step"]], (one.life, line)
            steps += 1
    return steps


def _nothing_waited(told: list[Told]) -> float:
    """P0: the longest time between two steps of a rank that was not stopped meanwhile."""
    longest = 0.0
    for one in told:
        times = [line["at"] for line in one.of("step")]
        for first, last in itertools.pairwise(times):
            stopped = sum(max(0.0, min(last, until) - max(first, since)) for since, until in one.life.stopped)
            longest = max(longest, last - first - stopped)
    assert longest < LONGEST_STEP_S
    return longest


def _steps_without_daemon(chaos: Chaos, told: list[Told]) -> int:
    """Steps that were taken while no daemon answered; that none of them waited is asserted above."""
    times = [line["at"] for one in told for line in one.of("step")]
    return sum(since < at < until for at in times for since, until in chaos.daemon_away)


def _nothing_was_said_too_often(told: list[Told]) -> None:
    """P0: no traceback in the job, and few warnings."""
    for one in told:
        text = one.life.said.read_text()
        assert "Traceback" not in text, text
        ended = one.life.killed_at or max((line["at"] for line in one.of("step")), default=one.life.began)
        assert len(text.splitlines()) <= WARNINGS * (1 + (ended - one.life.began) // 20), text


def _store_is_sound(chaos: Chaos, expected: Path) -> dict[str, Any]:
    """P2, P3, P4, P6, P8: all that was acknowledged is there, once, bit for bit; zarr reads all; nothing to repair."""
    report = check.compare(chaos.site.run, expected)
    assert check.is_sound(report), {name: report[name][:10] for name in check.LISTS if report[name]}
    assert report["found"] == report["published"]
    verified = json.loads(capd("verify", str(chaos.site.run), "--json").stdout)
    assert verified["ok"], verified
    assert verified["records"] == report["found"]
    return report


def _accounts_add_up(chaos: Chaos, told: list[Told]) -> int:
    """P1: every session's counters against what its rank wrote down; returns how many are unclean.

    A rank that never met a daemon has no session. One that died while no daemon watched is unclean: its counters are
    those that were persisted last.
    """
    stats = json.loads(capd("stats", str(chaos.site.run), "--json").stdout)
    sessions = {session["client"]: session for session in stats["sessions"]}
    kept = _kept_by_attempt(chaos.site.run)
    unclean = 0
    for one in told:
        [client] = [line["client"] for line in one.of("client")] or [None]
        session = sessions.pop(client, None)
        offered, acked = len(one.of("offer")), len(one.of("ack"))
        records = kept[one.life.rank, one.life.attempt]
        if session is None:
            assert not acked
            assert not records
            assert one.life.killed_at is not None
            continue
        assert (session["rank"], session["attempt"]) == (one.life.rank, one.life.attempt)
        if not session["clean"]:
            unclean += 1
            assert _died_unseen(chaos, one.life), session
            assert acked <= records
            continue
        assert session["in_flight"] == 0, session
        assert session["offered"] == session["committed"] + sum(session["dropped"].values()), session
        assert session["committed"] == records, session
        assert acked <= records <= offered
        # A rank killed between the two had written the offer down, and not made it yet.
        assert offered - session["offered"] in ({0, 1} if one.life.killed_at is not None else {0}), session
        _own_counters_agree(one, session)
    assert not sessions
    return unclean


def _ledger_names_what_was_dropped(chaos: Chaos, told: list[Told]) -> None:
    """P1: by key as well. Exact for attempts that left in order; what was lost with one that was killed has no key."""
    stats = json.loads(capd("stats", str(chaos.site.run), "--json").stdout)
    by_reason: Counter[str] = Counter()
    by_key: Counter[tuple[int, str]] = Counter()
    for drop in json.loads(capd("stats", str(chaos.site.run), "--drops", "--json").stdout):
        by_reason[drop["reason"]] += drop["count"]
        if drop["rank"] is not None:
            by_key[drop["rank"], drop["tensor_name"]] += drop["count"]
    assert by_reason == Counter(stats["dropped"])
    least: Counter[tuple[int, str]] = Counter()
    most: Counter[tuple[int, str]] = Counter()
    for one in told:
        acked = {line["id"] for line in one.of("ack")}
        given_up = Counter((one.life.rank, x["name"]) for x in one.of("offer") if x["id"] not in acked)
        most += given_up
        least += given_up if one.life.killed_at is None else Counter()
    assert least <= by_key <= most, (least - by_key, by_key - most)


def _own_counters_agree(one: Told, session: dict[str, Any]) -> None:
    """What a rank that left in order counted itself."""
    if one.life.killed_at is not None:
        assert session["state"] == "died", session
        return
    [end] = one.of("end")
    assert session["state"] == "ended", session
    assert end["flushed"], end
    own = end["counters"]
    assert own["committed"] == session["committed"] == len(one.of("ack")), (own, session)
    assert (own["offered"], own["in_flight"]) == (session["offered"], 0)
    assert own["dropped"] == session["dropped"], (own, session)


def _died_unseen(chaos: Chaos, life: Life) -> bool:
    """Whether a kill of the daemon, or a start that recovered the run, fell into the time around the rank's own end."""
    died = life.killed_at
    return died is not None and any(
        since - UNCLEAN_S <= died <= until + UNCLEAN_S for since, until in chaos.daemon_blind
    )


def _kept_by_attempt(run: Path) -> Counter[tuple[int, int]]:
    """Records of the run per rank and attempt."""
    found = check.Check(run).look()
    return Counter((rank, number // ATTEMPT) for rank, _, number in found.places)


def _bounds_were_kept(chaos: Chaos) -> None:
    """P5."""
    daemon = chaos.daemon_usage
    assert daemon.nbytes < DAEMON_NBYTES, daemon
    assert daemon.descriptors < DAEMON_DESCRIPTORS, daemon
    assert daemon.threads < DAEMON_THREADS, daemon
    assert chaos.rank_usage.threads < RANK_THREADS, chaos.rank_usage


def _nothing_is_left(chaos: Chaos) -> None:
    """P7: no process, socket, or unfinished file."""
    assert all(life.process.poll() is not None for life in chaos.lives)
    assert not chaos.site.is_alive()
    assert not chaos.site.socket.exists()
    assert chaos.site.leftovers() == []
    assert not [path for path in chaos.site.run.rglob("*") if path.name.endswith((".tmp", "-wal", "-shm"))]
