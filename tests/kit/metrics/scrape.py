"""Scrapes of a daemon's metrics, read with the parsers of Prometheus' own client."""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from tests.kit.daemon import PATIENCE_S, DaemonProcess

__all__ = ["OPENMETRICS", "Answer", "Samples", "address_of", "get", "samples"]

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""The samples of a page: (name, labels) → value."""


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: str

    @property
    def samples(self) -> Samples:
        return samples(
            self.body, openmetrics=self.headers["Content-Type"].startswith("application/openmetrics")
        )


class _OverUnix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def address_of(daemon: DaemonProcess) -> tuple[str, int]:
    """Host and port of the metrics, as the log says them."""
    found = re.search(r"metrics on http://(\[?[^/]+?\]?):(\d+)/metrics", daemon.text())
    assert found is not None, daemon.text()
    return found[1].strip("[]"), int(found[2])


def get(where: tuple[str, int] | Path, path: str = "/metrics", method: str = "GET", **headers: str) -> Answer:
    """One request. headers: with underscores in place of hyphens."""
    connection = (
        _OverUnix(where)
        if isinstance(where, Path)
        else http.client.HTTPConnection(*where, timeout=PATIENCE_S)
    )
    try:
        connection.request(
            method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read().decode())
    finally:
        connection.close()


def samples(page: str, *, openmetrics: bool = False) -> Samples:
    """Every sample of a page. Fails if one stands there twice."""
    families = list((openmetrics_families if openmetrics else text_families)(page))
    found = [
        (one.name, frozenset(one.labels.items()), one.value) for family in families for one in family.samples
    ]
    assert len({(name, labels) for name, labels, _ in found}) == len(found)
    return {(name, labels): float(value) for name, labels, value in found}
