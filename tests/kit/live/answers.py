"""Daemons of the tests of live views that answer STATS with what a test says, on a real socket."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from capd.live.records import NewRecord
from capd.metrics import DaemonStats, RunStats, SessionStats
from capd.store.format.statistics import Stats
from capd_client.protocol.control import Stats as AskStats
from capd_client.protocol.control import StatsReply
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import MAX_FRAME_NBYTES, decode_client, encode

__all__ = ["Answers", "new_record", "run", "session"]


def session(rank: int, **changes: Any) -> SessionStats:
    values: dict[str, Any] = {
        "client": f"{rank:032x}", "rank": rank, "attempt": 0, "host": "h", "pid": 10 + rank, "state": "live",
        "end": "", "connected": True, "offered": 0, "committed": 0, "in_flight": 0, "dropped": {}, "clean": True,
    }  # fmt: skip
    return SessionStats(**{**values, **changes})


def run(run_id: str = "run", sessions: list[SessionStats] | None = None, **changes: Any) -> RunStats:
    values: dict[str, Any] = {
        "run_id": run_id, "path": f"/s/{run_id}.zarr", "offered": 0, "committed": 0, "in_flight": 0, "dropped": {},
        "records": 0, "statistics_records": 0, "scalar_records": 0, "error_records": 0, "raw_bytes": 0,
        "stored_bytes": 0,
        "sessions": sessions or [], "clean": True, "rate_mib_s": 0.0, "sealed": False, "why_full": "",
    }  # fmt: skip
    return RunStats(**{**values, **changes})


class Answers:
    """A daemon that answers STATS with what the test says, on a real socket."""

    def __init__(self, path: Path) -> None:
        self.path, self.pid, self.now = path, 1, 0.0
        self.runs: list[RunStats] = []
        self.more: dict[str, Any] = {}
        self.alone: dict[str, RunStats] = {}
        self.beyond: dict[str, Any] = {}
        self._listener: socket.socket | None = None
        self._connections: list[Connection] = []

    def start(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self.path.unlink()
        for connection in self._connections:
            # Its thread reads, unless the sampler hung up.
            with contextlib.suppress(OSError):
                sock = socket.socket(fileno=os.dup(connection.fileno()))
                with sock:
                    sock.shutdown(socket.SHUT_RDWR)
        self._listener, self._connections = None, []

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            peer.recv(1)
            connection = Connection(peer.detach())
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection:
            while True:
                try:
                    asked = decode_client(connection.recv_bytes(MAX_FRAME_NBYTES))
                    assert isinstance(asked, AskStats)
                    connection.send_bytes(encode(StatsReply(self._stats(asked.run_id))))
                except (OSError, EOFError):
                    return

    def _stats(self, run_id: str | None) -> dict[str, Any]:
        values: dict[str, Any] = {
            "version": "1", "pid": self.pid, "node": "n", "store": "/s", "endpoint": "unix:/e", "uptime_s": self.now,
            "threads": 1, "disk_free": 1000, "keep_free": 100, "max_disk": None, "connections": 1,
            "refused_connections": {}, "runs": self.runs if run_id is None else [self.alone[run_id]],
        }  # fmt: skip
        return DaemonStats(**{**values, **self.more}).model_dump(mode="json") | self.beyond


def new_record(number: int, **changes: Any) -> NewRecord:
    """A record with statistics."""
    key: dict[str, Any] = {
        "quant_type": "bf16", "rank": 0, "tensor_name": "input", "module": "m.0", "component": "linear",
        "operation": "forward",
    }  # fmt: skip
    key |= {name: changes.pop(name) for name in Key.__struct_fields__ if name in changes}
    stats = Stats(4, 0, 0, 1, -2.0, 3.0, 3.0, 0.5, 1.5, 2.0, 14.0, {0: 1, 127: 2, 128: 1})
    values: dict[str, Any] = {
        "node": "n", "path": "bf16/rank0/layer0/pre/m.input", "number": number, "key": Key(**key), "dtype": "bfloat16",
        "shape": (2, 2), "nbytes": 8, "moment": Moment(iteration=number, time_ns=1_000_000_000 * (number + 1)),
        "device": "cpu", "stats": stats,
    }  # fmt: skip
    return NewRecord(**{**values, **changes})
