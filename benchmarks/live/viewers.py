"""The captured step beside everything that is live: the lab, rules, `capd top` and two open pages of `capd web`.

    python benchmarks/training_overhead.py --live [--rounds 12] [--json FILE]

Two jobs take turns (benchmarks/kit/turns.py). The daemon of one only captures. The other one has a lab and rules,
`capd top` on a pseudo terminal of 200 × 80 characters looks at it, and two clients read the events of `capd web`.
While the job alone has its turn, the readers stand still. Without `capd web` there are no pages, which is said.

"wall x" is the time of a step, watched against alone, round by round: the median of the ratios. "ack p99 x" is the
ratio of the 99th percentiles over all rounds. The memory is the largest that was seen after a block: resident of
`capd web`, anonymous of the daemon.

must: 1.02 for steps, 1.10 for acknowledgements, 256 MiB each, and no drop.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.kit.common import machine, percentile, report, spread
from benchmarks.kit.turns import PATIENCE_S, TurnJob, ack_ratio, serve_blocks, take_turns, wall_ratio
from benchmarks.live.lab import settled_lab
from benchmarks.live.top import Screen

STEP_MUST, ACK_MUST, MEMORY_MUST_MIB = 1.02, 1.10, 256.0
PAGES = 2
# The imports and the first frames.
SETTLE_S = 5.0
SETTINGS = """
[lab]
formats = ["fp8", "mxfp8", "nvfp4", "hifp8"]
sample = "1/8"
cpu = "20%"
[[trigger]]
name = "nan"
metric = "nan"
above = 0
[[trigger]]
name = "jump"
metric = "absmax"
factor_above = 1000
[[trigger]]
name = "underflow"
metric = "underflow:e4m3"
above = 0.99
tensors = ["output"]
[[trigger]]
name = "quiet"
metric = "silent"
above = 600
"""
NO_PAGES = "capd web is not there: no pages are open"


def read_events(port: int) -> None:
    """Read the events of a page until the end. The cookie comes on standard input."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", "/events", headers={"Cookie": sys.stdin.readline().strip()})
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"the page answered {answer.status}")
    print("open", flush=True)
    for _ in answer:
        pass


class Pages:
    """`capd web` and the clients that read its events."""

    def __init__(self, job: TurnJob) -> None:
        """Start them."""
        command = [sys.executable, "-m", "capd", "web", str(job.store), "--port", "0", "--no-browser"]
        self.web = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "CAPD_ENDPOINT": job.endpoint},
        )  # fmt: skip
        self.clients: list[subprocess.Popen[str]] = []
        assert self.web.stdout is not None
        link = re.search(r":(\d+)/\?token=(\S+)", self.web.stdout.readline())
        if link is None:
            raise RuntimeError("capd web has printed no link")
        port, token = int(link[1]), link[2]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("GET", f"/?token={token}")
        cookie = str(connection.getresponse().headers["Set-Cookie"]).partition(";")[0]
        connection.close()
        for _ in range(PAGES):
            client = subprocess.Popen(
                [sys.executable, __file__, "--events", str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True,
            )  # fmt: skip
            self.clients.append(client)
            assert client.stdin is not None
            assert client.stdout is not None
            client.stdin.write(cookie + "\n")
            client.stdin.flush()
            if client.stdout.readline() != "open\n":
                raise RuntimeError("a page does not open")

    def end(self) -> None:
        """End them."""
        for process in (*self.clients, self.web):
            process.kill()
            process.communicate()


class Viewers:
    """All readers of a job, which stand still unless it has its turn."""

    def __init__(self, job: TurnJob, *, with_pages: bool) -> None:
        """Start them, and let them come to rest."""
        os.environ["CAPD_ENDPOINT"] = job.endpoint
        self._job, self._screen = job, Screen(200, 80)
        self.pages = Pages(job) if with_pages else None
        self.web_mib = self.daemon_mib = 0.0
        time.sleep(SETTLE_S)
        self._send(signal.SIGSTOP)

    def run_block(self) -> None:
        """Run a block of the job that they read."""
        self._send(signal.SIGCONT)
        self._job.run_block()
        self.daemon_mib = max(self.daemon_mib, _memory_mib(self._job.pid, "RssAnon"))
        if self.pages is not None:
            self.web_mib = max(self.web_mib, _memory_mib(self.pages.web.pid, "VmRSS"))
        self._send(signal.SIGSTOP)

    def end(self) -> None:
        """End them. All must still be there."""
        lost = [process.pid for process in self._processes() if process.poll() is not None]
        if self.pages is not None:
            self.pages.end()
        self._screen.kill()
        if lost:
            raise RuntimeError(f"{len(lost)} of the readers have ended")

    def _processes(self) -> list[subprocess.Popen[Any]]:
        more = [] if self.pages is None else [self.pages.web, *self.pages.clients]
        return [self._screen.process, *more]

    def _send(self, number: int) -> None:
        for process in self._processes():
            process.send_signal(number)


def _memory_mib(pid: int, name: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(name))


def has_pages() -> bool:
    """Return whether there is `capd web`."""
    done = subprocess.run([sys.executable, "-m", "capd", "web", "--help"], capture_output=True, check=False)
    return done.returncode == 0


@contextlib.contextmanager
def jobs(steps: int, directory: Path | None) -> Iterator[tuple[TurnJob, TurnJob]]:
    """The job alone, and the one whose daemon has a lab and rules."""
    words = ["--steps", str(steps), *(["--directory", str(directory)] if directory else [])]
    with (
        tempfile.NamedTemporaryFile("w", prefix="capd-benchmark-", suffix=".toml") as config,
        contextlib.ExitStack() as stack,
    ):
        config.write(SETTINGS)
        config.flush()
        alone = stack.enter_context(contextlib.closing(TurnJob(__file__, words)))
        watched = stack.enter_context(
            contextlib.closing(TurnJob(__file__, [*words, "--config", config.name]))
        )
        yield alone, watched


def measure(rounds: int, steps: int, directory: Path | None) -> dict[str, Any]:
    """Let both jobs take turns, and return what they took."""
    with_pages = has_pages()
    if not with_pages:
        print(NO_PAGES)
    with jobs(steps, directory) as (alone, watched):
        for job in (alone, watched):
            job.run_block(counts=False)
        viewers = Viewers(watched, with_pages=with_pages)
        try:
            take_turns([alone.run_block, viewers.run_block], rounds)
        finally:
            viewers.end()
    return {
        "machine": machine(),
        "rounds": rounds,
        "steps_per_round": steps,
        "pages": PAGES * with_pages,
        "wall_ratios": wall_ratio(watched.wall_s["block"], alone.wall_s["block"]),
        "ack_ratio": ack_ratio(watched.ack_s["block"], alone.ack_s["block"]),
        "dropped": sum(sum(job.dropped.values()) for job in (alone, watched)),
        "web_mib": viewers.web_mib,
        "daemon_mib": viewers.daemon_mib,
        "lab": watched.last["settled"],
        "wall_s": {"alone": alone.wall_s["block"], "watched": watched.wall_s["block"]},
        "ack_s": {"alone": alone.ack_s["block"], "watched": watched.ack_s["block"]},
    }


def show(result: dict[str, Any]) -> None:
    """Print the table and the verdicts."""
    for name, blocks in result["wall_s"].items():
        p50, p99 = (1e3 * percentile(result["ack_s"][name], at) for at in (50, 99))
        walls = [one for block in blocks for one in block]
        print(
            f"{name:8s} wall s per step {spread(walls)}; acknowledged in {p50:.2f} ms p50, {p99:.2f} ms p99"
        )
    print(f"wall x by rounds {spread(result['wall_ratios'])}; {result['pages']} pages open")
    for name, value, bound in (
        ("watched / alone, wall x", statistics.median(result["wall_ratios"]), STEP_MUST),
        ("watched / alone, ack p99 x", result["ack_ratio"], ACK_MUST),
        ("capd web, MiB", result["web_mib"], MEMORY_MUST_MIB),
        ("daemon, anonymous MiB", result["daemon_mib"], MEMORY_MUST_MIB),
        ("dropped captures", result["dropped"], 0),
    ):
        print(f"{name}: {value:.3f}, bound {bound}: {'met' if value <= bound else 'MISSED'}")


def run(rounds: int, steps: int, directory: Path | None, path: Path | None) -> None:
    """Measure, print, and write the result."""
    result = measure(rounds, steps, directory)
    show(result)
    report(result, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--events", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=8, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        serve_blocks(args.steps, args.directory, args.config, settled_lab)
    elif args.events:
        read_events(args.events)
    else:
        parser.error("run benchmarks/training_overhead.py --live")


if __name__ == "__main__":
    main()
