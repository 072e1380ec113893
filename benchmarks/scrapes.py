"""The cost of metrics for a training step: 1,000 scrapes beside 50 slow readers, while every step is captured.

    python benchmarks/scrapes.py [--rounds 8] [--json FILE]

The job is that of training_overhead.py: 68 tensors, 35.1 MB a step. Two variants take turns in blocks within one
process: capd alone, and capd whose daemon is scraped a hundred times a second. A Prometheus scrapes it once in 15 s.
The 50 slow readers ask for pages, too, and take one byte of them per second. Some never end their request. A process
of its own scrapes with the lowest priority, because a Prometheus runs elsewhere. The rounds go on until there were
1,000 scrapes.

"wall x" is the time of a step, scraped against alone, round by round: the median of the ratios.

must: 1.01, and no drop.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

import capd_client
from benchmarks.kit.common import daemon, keep_freed_memory, machine, percentile, report, spread
from benchmarks.training_overhead import (
    ARENA_NBYTES,
    VOCABULARY,
    Variant,
    own_client,
    wait_until_acknowledged,
)

SCRAPES = 1000
SLOW_READERS = 50
INTERVAL_S = 0.01
MUST = 1.01
SEQUENCE = 128
MOST_ROUNDS = 60
PATIENCE_S = 30.0
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


# The process that scrapes


class SlowReaders:
    """Peers that take one byte per second. Some never end their request. Peers that were sent away come again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: list[socket.socket] = []
        self._next_s = 0.0

    def advance(self) -> None:
        """Read on, once per second."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + 1.0
        self._open = [sock for sock in self._open if _reads_on(sock)]
        for number in range(len(self._open), SLOW_READERS):
            sock = socket.socket()
            # A large one would take the whole page at once.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.connect(("127.0.0.1", self._port))
            sock.sendall(REQUEST[:20] if number % 3 == 0 else REQUEST)
            sock.setblocking(False)
            self._open.append(sock)


def _reads_on(sock: socket.socket) -> bool:
    try:
        if sock.recv(1):
            return True
    except BlockingIOError:
        return True
    except OSError:
        pass
    sock.close()
    return False


def scrape(port: int) -> int:
    """Return the bytes of one page."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
        sock.sendall(REQUEST)
        page = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    if not page.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"a scrape failed: {page[:200]!r}")
    return len(page)


def serve_scrapes(port: int) -> None:
    """Scrape while told to: "go" and "halt" on stdin; "end" prints the result."""
    os.nice(19)
    slow, times_s, nbytes, began = SlowReaders(port), list[float](), 0, time.process_time()
    going = False
    while True:
        ready = select.select([sys.stdin], [], [], INTERVAL_S if going else None)[0]
        word = sys.stdin.readline().strip() if ready else ""
        if word == "end":
            break
        if word:
            going = word == "go"
            print(len(times_s), flush=True)
        if going:
            slow.advance()
            before = time.perf_counter()
            nbytes = scrape(port)
            times_s.append(time.perf_counter() - before)
    result = {
        "scrapes": len(times_s), "page_nbytes": nbytes, "scrape_ms": [percentile(times_s, at) * 1e3 for at in (50, 99)],
        "scraper_cpu_s": time.process_time() - began,
    }  # fmt: skip
    print(json.dumps(result), flush=True)


class Scraper:
    """The process, told what to do."""

    def __init__(self, port: int) -> None:
        self.scrapes = 0
        command = [sys.executable, __file__, "--scraper", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Scraper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def tell(self, word: str) -> str:
        """Send a word, and return the answer."""
        told, heard = self._pipes()
        told.write(f"{word}\n")
        told.flush()
        answer = heard.readline()
        if not answer:
            raise RuntimeError("the process that scrapes has ended")
        return answer

    def go(self) -> None:
        """Begin to scrape."""
        self.tell("go")

    def halt(self) -> None:
        """Scrape no more, and count."""
        self.scrapes = int(self.tell("halt"))

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


# The job


def make_variants(scraper: Scraper) -> list[Variant]:
    """Return capd alone and capd scraped."""
    client = own_client()

    def watch(model: torch.nn.Module) -> Any:
        return capd_client.watch(
            model, steps="all", tensors=client.tensors, select={"components": client.components}
        )

    def watch_scraped(model: torch.nn.Module) -> Any:
        scraper.go()
        return watch(model)

    return [
        Variant("alone", watch, settle=wait_until_acknowledged),
        Variant("scraped", watch_scraped, settle=wait_until_acknowledged, after_block=scraper.halt),
    ]


def measure(variants: list[Variant], scraper: Scraper, rounds: int, steps: int, scrapes: int) -> int:
    """Interleave the variants, their order changing from round to round. Returns the number of rounds."""
    torch.manual_seed(0)
    model = own_client().make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(VOCABULARY, (1, SEQUENCE + 1))
    done = 0
    while done < rounds or (scraper.scrapes < scrapes and done < MOST_ROUNDS):
        for variant in variants[:: 1 if done % 2 else -1]:
            variant.run_block(model, optimizer, tokens, steps)
        done += 1
    return done


def show(result: dict[str, Any], variants: list[Variant]) -> None:
    """Print the table and the verdicts."""
    for variant in variants:
        print(f"{variant.name:8s} wall s per step {spread(variant.wall_s)}, CPU {spread(variant.cpu_s)}")
    scraped = result["scraper"]
    p50, p99 = scraped["scrape_ms"]
    print(
        f"{scraped['scrapes']} scrapes of {scraped['page_nbytes']} bytes beside {SLOW_READERS} slow readers: "
        f"{p50:.1f} ms p50, {p99:.1f} ms p99; {scraped['scraper_cpu_s']:.1f} s CPU of the process that scrapes"
    )
    counters = result["counters"]
    dropped = sum(counters["dropped"].values())
    print(f"{counters['offered']} offered, {counters['committed']} committed, {dropped} dropped")
    for name, value, bound in (
        ("scraped / alone, wall x", result["wall_ratio"], MUST),
        ("dropped captures", dropped, 0),
    ):
        print(f"{name}: {value:.3f}, bound {bound}: {'met' if value <= bound else 'MISSED'}")


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="rounds at least")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each variant in each round")
    parser.add_argument("--scrapes", type=int, default=SCRAPES, help="scrapes at least")
    parser.add_argument(
        "--directory", type=Path, help="where the temporary store goes (default: the system's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--scraper", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.scraper:
        serve_scrapes(args.scraper)
        return
    torch.set_num_threads(1)
    keep_freed_memory()
    port = free_port()
    with (
        daemon(
            args.directory, arena_nbytes=ARENA_NBYTES, options=["--metrics", f"127.0.0.1:{port}"]
        ) as running,
        Scraper(port) as scraper,
    ):
        variants = make_variants(scraper)
        rounds = measure(variants, scraper, args.rounds, args.steps, args.scrapes)
        scraped = json.loads(scraper.tell("end"))
        counters = capd_client.counters()
        capd_client.close()
    alone, beside = variants
    result = {
        "machine": machine(),
        "rounds": rounds,
        "steps_per_round": args.steps,
        "wall_ratio": 1 + beside.above(alone, alone)[1],
        "cpu_ratio": 1 + beside.above(alone, alone)[0],
        "wall_s": {variant.name: variant.wall_s for variant in variants},
        "scraper": scraped,
        "counters": counters,
        "daemon_cpu_s": running.cpu_s,
        "daemon_peak_anonymous_mib": running.peak_anonymous_mib,
    }
    show(result, variants)
    report(result, args.json)


if __name__ == "__main__":
    main()
