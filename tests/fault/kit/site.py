"""Where a fault test happens: one store, the daemons that serve it in turn, ranks, and the log they write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from capd_client.protocol.control import Control, ControlReply
from capd_client.protocol.messages import decode_daemon, encode
from tests.fault import check
from tests.fault.kit.load import Capture, ExpectedLog, Gone, LoadRank, capture
from tests.kit.daemon import tool
from tests.kit.processes import until

OPTIONS = ("--node", "n", "--max-disk", "100GB", "--keep-free", "0")


class Site:
    """A store below `directory`, a socket below `runtime`; every process it starts ends with `close`."""

    def __init__(
        self, directory: Path, runtime: Path, *, options: tuple[str, ...] = (), log: Path | None = None
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.store, self.run = directory / "store", directory / "store" / "run.zarr"
        self.socket = runtime / f"{directory.name[-40:]}.sock"
        self.log = ExpectedLog(log or directory / "expected.jsonl")
        self.options = options
        self.ranks: list[LoadRank] = []
        # Rank → the first capture of its next session.
        self.begins: dict[int, int] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self._said = runtime / f"{directory.name[-40:]}.log"
        self._started_at = 0
        # For the figures: records lost, twice or wrong, over all reports.
        self.judged: Counter[str] = Counter()

    def start(self, *options: str, prefix: tuple[str, ...] = (), **environment: str) -> bool:
        """Start a daemon, below `prefix`; whether it listens (else it has ended)."""
        self._launch(options, prefix, environment)
        until(lambda: "listening on" in self.says() or not self.is_alive(), 60.0)
        return self.is_alive()

    def _launch(self, options: tuple[str, ...], prefix: tuple[str, ...], environment: dict[str, str]) -> None:
        self._started_at = len(self.said())
        command = [*prefix, sys.executable, "-m", "capd", "serve", "--store", str(self.store)]
        with self._said.open("ab") as said:
            self.process = subprocess.Popen(
                [*command, "--endpoint", f"unix:{self.socket}", *OPTIONS, *self.options, *options],
                stdout=said,
                stderr=said,
                env={**os.environ, "CAPD_IDLE_SEAL_S": "3600", **environment},
            )

    def start_unwatched(self) -> None:
        """Start a daemon and do not wait for anything."""
        self._launch((), (), {})

    def is_alive(self) -> bool:
        """Whether the daemon runs."""
        return self.process is not None and self.process.poll() is None

    def said(self) -> str:
        """Everything the daemons said."""
        return self._said.read_text() if self._said.exists() else ""

    def says(self) -> str:
        """What the newest daemon said so far."""
        return self.said()[self._started_at :]

    def rank(self, number: int = 0, captures: Callable[[int, int], Capture] = capture) -> LoadRank:
        """A rank of this site, not connected yet."""
        self.ranks.append(LoadRank(self.socket, self.log, number, captures=captures))
        self.ranks[-1].next = self.begins.get(number, 0)
        return self.ranks[-1]

    def loaded(self, captures: int) -> LoadRank:
        """A daemon, and a rank of it whose first captures are kept."""
        assert self.start(), self.says()
        rank = self.rank()
        rank.connect()
        rank.offer(captures)
        rank.drain()
        return rank

    def verify(self, *options: str, **environment: str) -> int:
        """The exit code of `capd verify` (minus a signal's number); what it says goes where daemons speak."""
        with self._said.open("ab") as said:
            return subprocess.run(
                [sys.executable, "-m", "capd", "verify", str(self.run), *options],
                stdout=said,
                stderr=said,
                env={**os.environ, **environment},
                timeout=60,
                check=False,
            ).returncode

    def seal(self) -> bool:
        """Have the daemon seal the run; whether it could. Raises Gone."""
        try:
            with tool(self.socket) as connection:
                connection.send_bytes(encode(Control("seal", "run")))
                reply = decode_daemon(connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise Gone(str(error)) from error
        assert isinstance(reply, ControlReply), reply
        return reply.ok

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)

    def ended(self, timeout_s: float = 60.0) -> int:
        """Wait for the daemon to end by itself; the exit code (minus the signal's number)."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.ended(timeout_s)

    def close(self) -> None:
        """End everything by any means."""
        for rank in self.ranks:
            rank.close()
        self.kill()
        self.log.close()

    def report(self, *but: str) -> dict[str, Any]:
        """What the independent checker finds; nothing may be lost, twice, wrong, … except in the lists named."""
        report = check.compare(self.run, self.log.path)
        self.judged.update({name: len(report[name]) for name in ("lost", "duplicates", "wrong")})
        assert check.is_sound(report, *but), (
            f"{ {k: v for k, v in report.items() if v} }\n{self.said()[-4000:]}"
        )
        return report

    def finish(self, lost: Sequence[str] = (), *but: str) -> dict[str, Any]:
        """A daemon without faults: ranks send the rest, everything is sealed, nothing is left over.

        lost: what damage has cost, as the checker says it. but: lists of its report that need not be empty.
        """
        assert self.start(), self.says()
        for rank in self.ranks:
            rank.connect()
            rank.bye()
        assert self.stop() == 0, self.says()
        report = self.report("lost", *but)
        assert report["lost"] == list(lost), self.said()[-4000:]
        assert report["acked"] == self.log.offered - self.log.refused
        assert report["found"] == report["published"] == report["acked"] - len(lost) + len(report["refused"])
        assert self.leftovers() == []
        return report

    def leftovers(self) -> list[str]:
        """Files of the spool; none after everything was sealed."""
        return sorted(path.name for path in self.run.glob(".capd/*/spool/*"))


def exercise(site: Site, *ranks: LoadRank, captures: int = 26) -> bool:
    """Take every way into the store: new shards, small records, seals, shards that go on, an orderly stop.

    Whether the daemon was there to the end and could stop in order. Refused captures and seals are no matter.
    """
    try:
        for rank in ranks:
            rank.connect()
        for part in (captures, captures, captures // 3):
            for rank in ranks:
                rank.offer(part)
            for rank in ranks:
                rank.drain()
            if part == captures:
                site.seal()
    except Gone:
        return False
    return site.stop() == 0
