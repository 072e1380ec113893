"""A daemon below a service manager serves the metrics on the socket that is passed to it, and leaves the socket."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.daemon import PATIENCE_S, Rank, wait_for
from tests.kit.metrics.scrape import get
from tests.kit.paths import REPOSITORY
from tests.kit.tiers import rows

UNITS = REPOSITORY / "deploy" / "systemd"


@pytest.mark.skipif(
    shutil.which("systemd-socket-activate") is None,
    reason="systemd-socket-activate is missing: apt-get install systemd",
)
@pytest.mark.parametrize("kind", rows(["unix", "tcp"], ["unix"]))
def test_a_scrape_starts_the_daemon_and_is_answered_by_it(
    kind: str, tmp_path: Path, runtime_dir: Path
) -> None:
    ranks, path, log = runtime_dir / "ranks.sock", runtime_dir / "metrics.sock", runtime_dir / "log"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    where, address = (path, str(path)) if kind == "unix" else (("127.0.0.1", port), f"127.0.0.1:{port}")
    with log.open("wb") as stderr:
        daemon = subprocess.Popen(
            ["systemd-socket-activate", "-l", str(ranks), "-l", address, "--fdname=ranks:metrics", "-EPATH",
             "-EPYTHONPATH", sys.executable, "-m", "capd", "serve", "--store", str(tmp_path / "store")],
            stderr=stderr, stdout=stderr,
        )  # fmt: skip
    try:
        wait_for(lambda: log.read_text().count("Listening on") == 2, "both sockets")
        page = get(where)
        assert (page.status, get(where, "/healthz").body) == (200, "ok\n")
        assert page.samples["capd_connections", frozenset()] == 0

        rank = Rank(ranks)
        rank.connect()
        rank.count(offered=1)
        rank.put(1)
        rank.expect_acks(1)
        rank.bye()
        rank.close()
        committed = "capd_records_committed_total", frozenset({("run_id", "run")})
        wait_for(lambda: get(where).samples.get(committed) == 1, "the record on the page")
    finally:
        daemon.terminate()
        code = daemon.wait(PATIENCE_S)

    assert code == 0, log.read_text()
    if kind == "unix":
        assert f"metrics on unix:{path}\n" in log.read_text()
        # The service manager made it, and passes it to the next daemon.
        assert path.is_socket()


def test_the_unit_passes_its_socket_to_the_daemon_of_the_node(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing: apt-get install systemd")
    units = tmp_path / "units"
    shutil.copytree(UNITS, units)
    service = units / "capd.service"
    service.write_text(service.read_text().replace("/opt/capd/bin/capd", sys.executable))
    files = [str(units / name) for name in ("capd-metrics.socket", "capd.socket", "capd.service")]
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True, timeout=120
    )
    lines = (UNITS / "capd-metrics.socket").read_text().splitlines()

    assert checked.returncode == 0, checked.stderr
    assert str(units) not in checked.stderr
    assert {"FileDescriptorName=metrics", "Service=capd.service"} <= set(lines)
