"""A real Prometheus that scrapes what a test names."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.daemon import PATIENCE_S, wait_for

__all__ = ["Prometheus", "needs_prometheus", "prometheus"]

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus (Debian's package) is not installed"
)


class Prometheus:
    """A running server."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def api(self, path: str, **query: str) -> Any:
        address = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=PATIENCE_S) as reply:  # noqa: S310 - our own server
            return json.load(reply)["data"]

    def is_ready(self) -> bool:
        with contextlib.suppress(urllib.error.URLError, ConnectionError), \
                urllib.request.urlopen(f"{self._url}/-/ready", timeout=PATIENCE_S) as reply:  # fmt: skip # noqa: S310
            return bool(reply.status == 200)
        return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an expression now: a vector."""
        found: list[dict[str, Any]] = self.api("query", query=expression)["result"]
        return found

    def value(self, expression: str) -> float | None:
        """The value of an expression with one result; None without one."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None


@contextlib.contextmanager
def prometheus(directory: Path, target: dict[str, Any], rules: list[Path]) -> Iterator[Prometheus]:
    """A server with one scrape job, `capd`. target: the rest of its configuration, such as static_configs."""
    settings = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [{"job_name": "capd", **target}],
    }
    config = directory / "prometheus.yml"
    config.write_text(yaml.safe_dump(settings))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with (directory / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={directory / 'tsdb'}",
             f"--web.listen-address=127.0.0.1:{port}", "--query.lookback-delta=30s"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        server = Prometheus(port)
        wait_for(server.is_ready, "Prometheus is ready")
        yield server
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
