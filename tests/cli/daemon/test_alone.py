"""A daemon to which no rank comes says so, and what scripts need that do not know capd."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.kit.daemon import DaemonProcess, wait_for
from tests.kit.processes import capd

SOON = """
import sys
import capd.server.daemon as daemon
from capd.cli.app import main
daemon._ALONE_S = 0.5
main(sys.argv[1:])
"""
SAID = (
    "no rank has connected; scripts that do not import capd_client need CAPD_WATCH=1, "
    "or `capd run --attach -- CMD`"
)


def test_stats_of_a_daemon_without_a_run_say_why_that_may_be(runtime_dir: Path) -> None:
    daemon = DaemonProcess(runtime_dir / "store", runtime_dir / "capd.sock")
    endpoint = f"unix:{daemon.path}"
    found = capd("stats", check=False, CAPD_ENDPOINT=endpoint, CAPD_STORE=str(runtime_dir / "none"))
    daemon.stop()

    assert (found.returncode, found.stderr.strip()) == (5, f"capd: {SAID}")


def test_the_log_says_it_once(runtime_dir: Path) -> None:
    log = runtime_dir / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", SOON, "serve", "--store", runtime_dir / "store",
             "--endpoint", f"unix:{runtime_dir}/capd.sock"],
            stderr=out,
        )  # fmt: skip
    try:
        wait_for(lambda: SAID in log.read_text(), "the line")
    finally:
        process.terminate()
        process.wait(30)

    assert log.read_text().count(SAID) == 1
