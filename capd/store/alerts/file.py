"""The file of a node's alerts, `.capd/node=NAME/alerts.jsonl`: its writer, its reader, and a reader that follows it.

Only the daemon of the node appends. A kill or a loss of power may leave a part of a line at the end, which readers
leave out and the next daemon cuts off.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from capd.errors import StoreError
from capd.store.alerts.alert import MAX_LINE_NBYTES, Alert, alert_line, alert_of
from capd.store.disk.files import opened, pwrite_all, sync_data, sync_paths, truncate, write_file
from capd.store.disk.layout import node_directory, nodes_of
from capd.store.disk.line_file import Lines, parsed_lines, read_line_file, whole_lines_of

__all__ = [
    "ALERTS_NAME", "MAX_ALERTS_NBYTES", "AlertFollower", "AlertWriter", "alerts_of_run", "alerts_path",
    "parse_alerts", "read_alerts", "whole_lines", "write_alerts",
]  # fmt: skip

ALERTS_NAME = "alerts.jsonl"
MAX_ALERTS_NBYTES = 16 << 20
"""A daemon appends no further alert to a larger file, and nobody reads more of one."""
_MOST_NBYTES = MAX_ALERTS_NBYTES + MAX_LINE_NBYTES


def alerts_path(run: Path, node: str) -> Path:
    """Return the file of a node's alerts."""
    return node_directory(run, node) / ALERTS_NAME


def parse_alerts(payload: bytes) -> Lines[Alert]:
    """Return the alerts in the bytes of a file, which may come from anybody."""
    return parsed_lines(payload, alert_of)


def read_alerts(path: Path, start: int = 0) -> Lines[Alert]:
    """Return the alerts of a file from an offset on; none if there is no file.

    Raises:
        StoreError: It is not a regular file.
        OSError: It cannot be read.
    """
    return parse_alerts(read_line_file(path, _MOST_NBYTES, start))


def whole_lines(path: Path) -> bytes:
    """Return the bytes of a file up to the end of its last whole line. Raises as `read_alerts`."""
    return whole_lines_of(path, _MOST_NBYTES)


def alerts_of_run(run: Path) -> list[Alert]:
    """Return the alerts of all nodes of a run, in order of time. Raises as `read_alerts`."""
    found = [alert for node in nodes_of(run) for alert in read_alerts(alerts_path(run, node)).items]
    return sorted(found, key=lambda alert: alert.time_ns)


def write_alerts(run: Path, alerts: Mapping[str, Iterable[Alert]]) -> None:
    """Write the alerts of a new run, durably.

    Args:
        run: The directory of the run.
        alerts: The alerts by node. Nodes without a part in the run are left out.

    Raises:
        OSError: A file cannot be written.
    """
    for node, those in alerts.items():
        path = alerts_path(run, node)
        payload = b"".join(map(alert_line, those))
        if payload and path.parent.is_dir():
            write_file(path, payload)
            sync_paths([path, path.parent], run)


class AlertFollower:
    """Reads the alerts of a run that came since the last call."""

    def __init__(self, run: Path, node: str | None = None) -> None:
        """Begin before the first alert. node: the only node that is read; None reads all."""
        self._run, self._node = run, node
        self._read: dict[str, int] = {}

    def new(self) -> list[Alert]:
        """Return the alerts that came, in order of time. Raises as `read_alerts`."""
        found: list[Alert] = []
        for node in nodes_of(self._run) if self._node is None else [self._node]:
            path, start = alerts_path(self._run, node), self._read.get(node, 0)
            if start and _size(path) < start:
                # Whole lines are never taken back: it is the file of a new run.
                start = 0
            lines = read_alerts(path, start)
            self._read[node] = start + lines.nbytes
            found += lines.items
        return sorted(found, key=lambda alert: alert.time_ns)


class AlertWriter:
    """Appends to the file of one node's alerts. One thread of one process has it."""

    def __init__(self, run: Path, node: str, *, durable: bool) -> None:
        """Remember the place. The file is made with its first alert.

        Args:
            run: The directory of the run.
            node: The name of the node.
            durable: Whether an alert survives a loss of power.
        """
        self._path, self._durable = alerts_path(run, node), durable
        self._nbytes: int | None = None

    def begin(self) -> list[Alert]:
        """Return the alerts that are there. A part of a line at the end is cut off.

        Raises:
            StoreError: It is not a regular file.
            OSError: It cannot be read or changed.
        """
        held = read_alerts(self._path)
        if held.torn_nbytes:
            truncate(self._path, held.nbytes)
        self._nbytes = held.nbytes
        return held.items

    def append(self, alerts: Iterable[Alert]) -> None:
        """Append alerts in one write.

        Raises:
            StoreError: The file is full.
            OSError: It cannot be written. None of them is in the file then.
        """
        if self._nbytes is None or self._nbytes != _size(self._path):
            # The run may have been removed and begun again.
            self.begin()
        assert self._nbytes is not None  # noqa: S101 - just read
        payload = b"".join(map(alert_line, alerts))
        if self._nbytes + len(payload) > MAX_ALERTS_NBYTES:
            raise StoreError(
                f"{self._path} has its {MAX_ALERTS_NBYTES >> 20} MiB; further alerts are not stored"
            )
        is_new = not self._path.exists()
        try:
            with opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW) as fd:
                end = pwrite_all(fd, [payload], self._nbytes)
                if self._durable:
                    sync_data(fd)
        except OSError:
            # The next append looks at the file again.
            self._nbytes = None
            raise
        self._nbytes = end
        if is_new and self._durable:
            sync_paths([self._path.parent], self._path.parent)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
