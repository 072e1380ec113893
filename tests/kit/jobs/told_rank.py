"""A training rank that does as it is told on its standard input, and answers in JSON lines."""

from __future__ import annotations

import json
import sys
import threading
from abc import ABC, abstractmethod
from typing import Any

import capd_client

__all__ = ["ToldRank", "answer"]


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


class ToldRank(ABC):
    """`step` trains one iteration, and adds to `losses`."""

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self._stop = threading.Event()
        self._worker: threading.Thread | None = None

    @abstractmethod
    def step(self) -> None: ...

    def obey(self, verb: str, *numbers: int) -> Any:
        if verb == "train":
            for _ in range(numbers[0]):
                self.step()
            return len(self.losses)
        if verb == "run":
            self._worker = threading.Thread(target=self._run)
            self._worker.start()
            return "running"
        if verb == "halt":
            assert self._worker is not None
            self._stop.set()
            self._worker.join()
            return len(self.losses)
        if verb == "losses":
            return self.losses
        assert verb == "counters", verb
        return capd_client.counters()

    def serve(self) -> None:
        """Until told to leave."""
        answer("ready")
        for line in iter(sys.stdin.readline, ""):
            verb, *numbers = line.split()
            if verb == "leave":
                break
            answer(self.obey(verb, *map(int, numbers)))
        capd_client.close()

    def _run(self) -> None:
        """Train until told to stop, at a pace that a busy machine's daemon keeps up with."""
        while not self._stop.wait(0.03):
            self.step()
