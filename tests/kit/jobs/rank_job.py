"""A rank that captures what it is told on its standard input and answers in JSON lines."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import capd_client
from tests.kit import content


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def capture(rank: int, first: int, last: int) -> None:
    for n in range(first, last):
        capd_client.capture(content.tensor(rank, n), tensor_name=content.name(n), iteration=n)


def stream(rank: int, first: int, stop: threading.Event) -> None:
    """Capture until told to stop, a little at a time; the main thread goes on listening."""
    n = first
    while not stop.wait(0.004):
        capture(rank, n, n + 1)
        n += 1
        stream.captured = n  # type: ignore[attr-defined]


def main() -> None:
    rank = int(os.environ["RANK"])
    stop = threading.Event()
    worker: threading.Thread | None = None
    for line in sys.stdin:
        verb, *numbers = line.split()
        arguments = [int(number) for number in numbers]
        if verb == "capture":
            capture(rank, *arguments)
            answer("captured")
        elif verb == "stream":
            worker = threading.Thread(target=stream, args=(rank, arguments[0], stop))
            worker.start()
            answer("streaming")
        elif verb == "halt":
            stop.set()
            assert worker is not None
            worker.join()
            stop.clear()
            answer(stream.captured)  # type: ignore[attr-defined]
        elif verb == "flush":
            answer(capd_client.flush(timeout_s=arguments[0] if arguments else 30))
        elif verb == "counters":
            answer(capd_client.counters())
        elif verb == "leave":
            break
    capd_client.close()


if __name__ == "__main__":
    main()
