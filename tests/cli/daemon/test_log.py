"""The log of the daemon is one JSON object a line, also when a thread or the start fails."""

from __future__ import annotations

import json
import subprocess
import sys

DIE = """
import logging, threading
from capd.cli.daemon.log import start_log
start_log(logging.INFO, "json")
thread = threading.Thread(target=lambda: 1 // 0, name="capd-metrics")
thread.start()
thread.join()
"""


def test_the_end_of_a_thread_is_an_entry() -> None:
    done = subprocess.run([sys.executable, "-c", DIE], capture_output=True, text=True, timeout=60)
    [entry] = [json.loads(line) for line in done.stderr.splitlines()]

    assert (entry["level"], entry["message"]) == ("critical", "the thread capd-metrics ended")
    assert "ZeroDivisionError" in entry["exception"]
