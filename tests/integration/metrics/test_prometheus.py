"""A real Prometheus scrapes a running job: it has the counters of `capd stats`, and all that is shipped works."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kit import processes as real
from tests.kit.daemon import DaemonProcess, daemons, wait_for
from tests.kit.metrics.prometheus import needs_prometheus, prometheus
from tests.kit.metrics.scrape import address_of
from tests.repo.dashboard import PAGE, expressions
from tests.repo.test_dashboard import RULES, alert_expressions

SCRAPED_S = 30.0


@needs_prometheus
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_prometheus_scrapes_a_running_job(runtime_dir: Path, tmp_path: Path) -> None:
    token = runtime_dir / "token"
    token.write_text("s3cret-s3cret-s3cret\n")
    token.chmod(0o600)
    config = runtime_dir / "capd.toml"
    rule, window = 'name = "nan"\nmetric = "nan"\nabove = 0\n', 'iterations = 4\nbytes = "64MiB"\n'
    config.write_text(f"[[trigger]]\n{rule}[window]\n{window}")
    with daemons() as made:
        made.append(
            DaemonProcess(runtime_dir / "store", runtime_dir / "s.sock", "--metrics", "127.0.0.1:0",
                          "--metrics-token-file", str(token), "--durability", "durable", "--config", str(config),
                          "--upload-to", f"file://{tmp_path}/uploaded",
                          env={**os.environ, "CAPD_RUN_MAX": "100GB"})
        )  # fmt: skip
        daemon = made[0]
        host, port = address_of(daemon)
        target = {
            "static_configs": [{"targets": [f"{host}:{port}"]}],
            "authorization": {"credentials_file": str(token)},
        }
        ranks = [real.Rank(f"unix:{daemon.path}", number) for number in range(2)]
        try:
            with prometheus(tmp_path, target, [RULES]) as server:
                for rank in ranks:
                    assert rank.ask("stream 0") == "streaming"
                began = time.monotonic()
                wait_for(
                    lambda: (server.value("count_over_time(up[1h])") or 0) >= SCRAPED_S
                    and time.monotonic() - began >= SCRAPED_S,
                    "Prometheus scraped for 30 s", timeout_s=120,
                )  # fmt: skip
                assert server.value("min_over_time(up[1h])") == 1
                for rank in ranks:
                    rank.ask("halt")
                    assert rank.ask("flush") is True
                # What the flight recorder holds is in flight, and older iterations leave.
                wait_for(lambda: has_settled(daemon.run_stats("run")), "old iterations leave")
                stats = daemon.run_stats("run")
                assert stats["in_flight"] == stats["window"]["held_records"]
                for name, count in (
                    ("capd_records_offered_total", stats["offered"]),
                    ("capd_records_committed_total", stats["committed"]),
                    ("capd_raw_bytes_total", stats["raw_bytes"]),
                    ("sum(capd_records_dropped_total)", sum(stats["dropped"].values())),
                    ("capd_window_held_records", stats["window"]["held_records"]),
                    ("sum(capd_window_held_bytes)", stats["window"]["held_bytes"]),
                ):
                    wait_for(lambda name=name, count=count: server.value(name) == count, f"{name} is {count}")
                [target_state] = server.api("targets")["activeTargets"]
                assert (target_state["health"], target_state["lastError"]) == ("up", "")
                empty = [one for one in expressions(json.loads(PAGE.read_text())) if not server.query(one)]
                assert empty == []
                # Without their comparisons, alerts have values, too.
                values = {
                    name: re.sub(r"(>=|>|<|==) [0-9.]+", "", one) for name, one in alert_expressions().items()
                }
                assert [name for name, one in values.items() if not server.query(one)] == []
                groups = server.api("rules")["groups"]
                rules = [rule for group in groups for rule in group["rules"]]
                assert {rule["name"]: rule["health"] for rule in rules} == dict.fromkeys(
                    alert_expressions(), "ok"
                )
                # Others use the same disk.
                assert {rule["name"] for rule in rules if rule["alerts"]} <= {"CapdDiskFull"}
                ranks[0].kill()
                wait_for(
                    lambda: "CapdRankDied" in {one["labels"]["alertname"] for one in server.api("alerts")["alerts"]},
                    "the alert of the killed rank", timeout_s=90,
                )  # fmt: skip
        finally:
            for rank in ranks:
                rank.kill()


def has_settled(stats: dict[str, Any]) -> bool:
    """Whether the recorder holds four iterations up to that of the slowest rank, and what others are ahead of it."""
    slowest: int = min(session["iteration"] for session in stats["sessions"])
    return bool(stats["window"]["first"] >= slowest - 3)
