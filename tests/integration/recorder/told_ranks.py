"""A daemon with a flight recorder, the ranks of told_job.py, and what the store must have of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from capd.store.alerts.alert import Alert
from capd.store.alerts.file import alerts_of_run
from capd.store.read.series import Series
from capd.store.read.store import Store
from tests.kit import forking
from tests.kit.daemon import DaemonProcess, wait_for
from tests.kit.processes import Rank

__all__ = ["JOB", "NAN", "TENSORS", "Recording", "TensorHash", "assert_exact", "free_port"]

JOB = Path(__file__).with_name("told_job.py")
NAN = '[[trigger]]\nname = "nan"\nmetric = "nan"\nabove = 0\naction = "keep"\ncooldown = 1000\n'
NOWHERE = -1
TENSORS = 10
"""The tensors of a step of a rank: X, W, Y, dY and dX of two layers."""

TensorHash = tuple[int, str, str, str, str]
"""Iteration, module, operation, name and hash of a tensor."""


def free_port() -> int:
    """A port that is free now."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        return int(taken.getsockname()[1])


class Recording:
    """One run: its daemons, which may be killed, and its ranks."""

    def __init__(self, directory: Path, made: list[DaemonProcess]) -> None:
        self.directory, self.store = directory, directory / "store"
        self.run = self.store / "run.zarr"
        self.ranks: list[Rank] = []
        self.nodes: set[str] = set()
        self._made = made

    def serve(self, rules: str = NAN, *, node: str = "n", head: str = "", **window: Any) -> DaemonProcess:
        """Start a daemon, or start it again on the same socket."""
        self.nodes.add(node)
        # The default of bytes needs more room than a machine for tests may have.
        rows = {"iterations": 4, "bytes": '"64MiB"', **window}
        told = "".join(f"{name} = {value}\n" for name, value in rows.items())
        settings = self.directory / f"{node}.toml"
        settings.write_text(f"[daemon]\nidle_seal_s = 0.2\n{head}\n[window]\n{told}{rules}")
        options = ["--config", str(settings), "--node", node]
        self._made.append(DaemonProcess(self.store, self.directory / f"{node}.sock", *options))
        return self._made[-1]

    def start_ranks(
        self, count: int = 2, bad: tuple[int, int] = (NOWHERE, 0), *, joint: bool = True, nodes: str = "n"
    ) -> list[Rank]:
        """Start the ranks, and wait until they can train.

        Args:
            count: How many.
            bad: The step and the rank of the NaN.
            joint: Whether they add up their gradients. The death of one then ends all.
            nodes: The name of the node of each rank, one letter each; the last one goes on.
        """
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if joint else {}
        for number in range(count):
            words = [str(JOB), str(self.written(number)), *map(str, bad)]
            endpoint = self.directory / f"{nodes[min(number, len(nodes) - 1)]}.sock"
            self.ranks.append(
                Rank(
                    f"unix:{endpoint}", number, command=(sys.executable, *words), imports=forking.TRAINING,
                    WORLD_SIZE=str(count), OMP_NUM_THREADS="1", CAPD_MAX_BLOCK_MS="20000", **shared,
                )
            )  # fmt: skip
        assert [rank.hear() for rank in self.ranks] == ["ready"] * count
        return self.ranks

    def train_to(self, step: int) -> None:
        """Let all ranks train up to and with a step. Everything captured is held or committed then."""
        self.tell("to", step)
        assert [rank.hear() for rank in self.ranks] == [True] * len(self.ranks)

    def tell(self, *words: object) -> None:
        """Tell all ranks the same."""
        for rank in self.ranks:
            rank.tell(" ".join(map(str, words)))

    def leave(self) -> None:
        """Let all ranks end in order."""
        self.tell("leave")
        for rank in self.ranks:
            assert rank.process.wait(60) == 0

    def written(self, rank: int) -> Path:
        """The file in which a rank wrote what it captured."""
        return self.directory / f"rank{rank}.jsonl"

    def captured(self, rank: int, iterations: Iterable[int]) -> Counter[TensorHash]:
        """What a rank captured in these iterations, as its own hooks saw it."""
        wanted = set(iterations)
        rows = [tuple(json.loads(line)) for line in self.written(rank).read_text().splitlines()]
        return Counter(row for row in rows if row[0] in wanted)

    def series(self, rank: int) -> list[Series]:
        """The series of a rank in the store."""
        return Store(self.run).find(rank=rank, attempt="all")

    def kept(self, rank: int) -> Counter[TensorHash]:
        """What the store has of a rank. Each record must say why it is there."""
        found: Counter[TensorHash] = Counter()
        for series in self.series(rank):
            key = series.key
            for number, record in enumerate(series.records):
                assert record.metadata["trigger"].keys() == {"reason", "iteration"}
                elements = series.numpy(number).tobytes()
                name = (record.iteration, key.module, key.operation, key.tensor_name)
                found[*name, hashlib.sha256(elements).hexdigest()] += 1
        return found

    def iterations(self, rank: int) -> list[int]:
        """The iterations of which the store has tensors of a rank."""
        return sorted({row[0] for row in self.kept(rank)})

    def assert_kept(self, iterations: Iterable[int]) -> None:
        """The store has these iterations of all ranks whole and bit for bit, each tensor once, and no other."""
        wanted = list(iterations)
        for rank in range(len(self.ranks)):
            assert self.iterations(rank) == wanted, (rank, self.iterations(rank), wanted)
            expected = self.captured(rank, wanted)
            assert expected.total() == TENSORS * len(wanted), (rank, expected)
            found = self.kept(rank)
            assert found == expected, (rank, found - expected, expected - found)

    def alerts(self) -> list[Alert]:
        """The alerts of the run so far."""
        return alerts_of_run(self.run) if self.run.exists() else []

    def an_alert(self) -> Alert:
        """The only alert, once it is there."""
        [alert] = wait_for(self.alerts, "an alert")
        return alert

    def reasons(self, rank: int) -> set[tuple[str, int]]:
        """Why the records of a rank were kept."""
        return {
            (record.metadata["trigger"]["reason"], record.metadata["trigger"]["iteration"])
            for series in self.series(rank)
            for record in series.records
        }


def assert_exact(stats: dict[str, Any]) -> None:
    """Of a run and of each of its ranks: offered = committed + in flight + dropped."""
    for row in (stats, *stats["sessions"]):
        assert row["offered"] == row["committed"] + row["in_flight"] + sum(row["dropped"].values()), row
