"""Writes the dashboard of Grafana: `python -m tests.repo.dashboard` makes deploy/grafana/capd.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from capd.drops import REQUESTED
from tests.kit.paths import REPOSITORY

__all__ = ["PAGE", "dashboard", "expressions"]

PAGE = REPOSITORY / "deploy" / "grafana" / "capd.json"

# Grafana's grid has 24 columns.
COLUMNS = 24
HEIGHT = 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# One daemon, or one run of it.
DAEMON = 'instance=~"$instance"'
RUN = f'{DAEMON}, run_id=~"$run_id"'

Panel = dict[str, Any]
Target = tuple[str, str]  # expression, legend


def rate(metric: str, where: str = RUN, more: str = "") -> str:
    return f"rate({metric}{{{where}{more}}}[$__rate_interval])"


def quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by (le) ({rate(f'{metric}_bucket', DAEMON)}))"


def panel(title: str, text: str, kind: str, unit: str, *targets: Target, **more: Any) -> Panel:
    return {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, **more.pop("defaults", {})}, "overrides": []},
        "options": more.pop("options", {}),
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
                **more.get("target", {}),
            }
            for at, (expression, legend) in enumerate(targets)
        ],
    }


def lines(title: str, text: str, unit: str, *targets: Target, stacked: bool = False) -> Panel:
    custom = {"fillOpacity": 10, "showPoints": "never"}
    if stacked:
        custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 40}
    return panel(
        title, text, "timeseries", unit, *targets,
        defaults={"custom": custom, "min": 0},
        options={"legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]}},
    )  # fmt: skip


def number(title: str, text: str, unit: str, target: Target, red_from: float | None = None) -> Panel:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if red_from is not None:
        steps.append({"color": "red", "value": red_from})
    return panel(
        title, text, "stat", unit, target,
        defaults={"thresholds": {"mode": "absolute", "steps": steps}},
        options={"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"},
    )  # fmt: skip


def heat_map(title: str, text: str, metric: str) -> Panel:
    expression = f"sum by (le) (increase({metric}_bucket{{{DAEMON}}}[$__rate_interval]))"
    return panel(
        title, text, "heatmap", "s", (expression, "{{le}}"),
        target={"format": "heatmap"},
        options={"calculate": False, "yAxis": {"unit": "s"}, "color": {"scheme": "Oranges", "mode": "scheme"}},
    )  # fmt: skip


def table(title: str, text: str, expression: str) -> Panel:
    return panel(title, text, "table", "none", (expression, ""), target={"format": "table", "instant": True})


# What the user's settings leave out is no loss.
CHOSEN = "|".join(sorted(REQUESTED))
EXPIRED = ', reason="expired"'
LOST = f'capd_records_dropped_total{{{RUN}, reason!~"{CHOSEN}"}}'

ROWS: list[tuple[str, int, list[Panel]]] = [
    ("Health", 4, [
        number("Live ranks", "Ranks that are here", "none",
               (f'sum(capd_sessions{{{RUN}, state="live"}})', "live")),
        number("Died ranks", "Ranks that ended without saying goodbye", "none",
               (f'sum(capd_sessions{{{RUN}, state="died"}})', "died"), 1),
        number("Oldest capture", "The age of the oldest capture that is not committed", "s",
               (f"max(capd_oldest_uncommitted_seconds{{{DAEMON}}})", "oldest"), 60),
        number("Lost captures", "Captures lost in the range of time, without those that the user left out", "short",
               (f"sum(increase({LOST}[$__range]))", "lost"), 1),
        number("Failed stores", "Daemons that cannot write their store", "none",
               (f"sum(capd_store_failed{{{DAEMON}}})", "failed"), 1),
        number("Connections", "Open connections of ranks and tools", "none",
               (f"sum(capd_connections{{{DAEMON}}})", "open")),
    ]),
    ("Daemons and runs", HEIGHT, [
        table("Daemons", "Version, format and node of each daemon", f"capd_build_info{{{DAEMON}}}"),
        table("Runs", "World size, quant types and Slurm job of each run", f"capd_run_info{{{RUN}}}"),
        lines("Refused connections", "Connections sent away, by code", "ops",
              (f"sum by (code) ({rate('capd_refused_connections_total', DAEMON)})", "{{code}}")),
    ]),
    ("Throughput", HEIGHT, [
        lines("Captures", "Captures offered by ranks and committed to the store", "ops",
              (f"sum by (run_id) ({rate('capd_records_offered_total')})", "{{run_id}} offered"),
              (f"sum by (run_id) ({rate('capd_records_committed_total')})", "{{run_id}} committed")),
        lines("Bytes", "Bytes before encoding, and in the store", "Bps",
              (f"sum by (run_id) ({rate('capd_raw_bytes_total')})", "{{run_id}} raw"),
              (f"sum by (run_id) ({rate('capd_stored_bytes_total')})", "{{run_id}} stored")),
        lines("Stored share", "Stored bytes of each raw byte", "percentunit",
              (f"sum by (run_id) (capd_stored_bytes_total{{{RUN}}}) / "
               f"sum by (run_id) (capd_raw_bytes_total{{{RUN}}})", "{{run_id}}")),
        lines("By Slurm job", "Committed captures by the Slurm job of the run", "ops",
              (f"sum by (slurm_job_id) ({rate('capd_records_committed_total')} "
               "* on (instance, run_id) group_left (slurm_job_id) capd_run_info)", "{{slurm_job_id}}")),
    ]),
    ("Drops and values", HEIGHT, [
        lines("Drops by reason", "Captures given up; sampled, stopped and expired are choices", "ops",
              (f"sum by (reason) ({rate('capd_records_dropped_total')})", "{{reason}}"), stacked=True),
        lines("In flight", "Captures that are neither committed nor dropped", "short",
              (f"sum by (run_id) (capd_records_in_flight{{{RUN}}})", "{{run_id}}")),
        lines("Non-finite values", "NaN and Inf in records with statistics", "ops",
              (f"sum by (run_id, kind) ({rate('capd_values_nonfinite_total')})", "{{run_id}} {{kind}}")),
    ]),
    ("Rules", HEIGHT, [
        lines("Alerts", "What the rules of capd.toml said, by rule and severity", "short",
              (f"sum by (run_id, rule, severity) (increase(capd_alerts_total{{{RUN}}}[$__rate_interval]))",
               "{{run_id}} {{rule}} {{severity}}")),
        lines("Kept quiet", "Rules that fired within their cooldown, and records that no rule judged", "ops",
              (rate("capd_alerts_suppressed_total", DAEMON), "{{instance}} suppressed"),
              (rate("capd_rule_records_omitted_total", DAEMON), "{{instance}} not judged")),
    ]),
    ("Flight recorder", HEIGHT, [
        lines("Held", "Bytes that the flight recorder holds in memory and on disk", "bytes",
              (f"sum by (run_id, place) (capd_window_held_bytes{{{RUN}}})", "{{run_id}} {{place}}"), stacked=True),
        lines("Held records", "Records that are held, which are in flight, and their iterations", "short",
              (f"sum by (run_id) (capd_window_held_records{{{RUN}}})", "{{run_id}} records"),
              (f"max by (run_id) (capd_window_iterations{{{RUN}}})", "{{run_id}} iterations")),
        lines("Keeps", "Times that the recorder kept what it held", "short",
              (f"max by (run_id) (increase(capd_window_keeps_total{{{RUN}}}[$__rate_interval]))", "{{run_id}}")),
        lines("Let go", "Records that left the recorder, as the settings ask for", "ops",
              (f"sum by (run_id) ({rate('capd_records_dropped_total', more=EXPIRED)})", "{{run_id}}")),
    ]),
    ("Latency", HEIGHT, [
        heat_map("Commits", "From the arrival of a capture to its commit", "capd_commit_duration_seconds"),
        lines("Oldest capture", "The age of the oldest capture that is not committed", "s",
              (f"capd_oldest_uncommitted_seconds{{{DAEMON}}}", "{{instance}}")),
        lines("Quantiles", "A slow disk shows in syncs and seals first", "s",
              *((quantile(share, f"capd_{what}_duration_seconds"), f"{what} p{share * 100:.0f}")
                for what in ("commit", "sync", "seal") for share in (0.5, 0.99))),
    ]),
    ("Memory and CPU", HEIGHT, [
        lines("Staging", "Raw bytes between the arenas and the disk, and their limit", "bytes",
              (f"capd_staging_bytes{{{DAEMON}}}", "{{instance}}"),
              (f"capd_staging_limit_bytes{{{DAEMON}}}", "{{instance}} limit")),
        lines("Memory", "The daemon's resident memory, and the arenas of its ranks", "bytes",
              (f"process_resident_memory_bytes{{{DAEMON}}} * on (instance, job) capd_build_info", "{{instance}}"),
              (f"sum by (instance) (capd_arena_bytes{{{RUN}}})", "{{instance}} arenas")),
        lines("CPU", "Cores in use by the daemon, and by its encode threads", "none",
              (f"{rate('process_cpu_seconds_total', DAEMON)} * on (instance, job) capd_build_info", "{{instance}}"),
              (rate("capd_encode_cpu_seconds_total", DAEMON), "{{instance}} encode"),
              (f"capd_threads{{{DAEMON}}}", "{{instance}} encode threads")),
        lines("Open files", "The daemon's file descriptors", "none",
              (f"process_open_fds{{{DAEMON}}} * on (instance, job) capd_build_info", "{{instance}}")),
    ]),
    ("Disk", HEIGHT, [
        lines("Free space", "Free bytes, those that stay free, and the forecast for one hour ahead", "bytes",
              (f"capd_store_free_bytes{{{DAEMON}}}", "{{instance}} free"),
              (f"capd_store_keep_free_bytes{{{DAEMON}}}", "{{instance}} keep_free"),
              (f"predict_linear(capd_store_free_bytes{{{DAEMON}}}[15m], 3600)", "{{instance}} in 1 h")),
        lines("Budget", "Bytes that count against max_disk", "bytes",
              (f"capd_store_used_bytes{{{DAEMON}}}", "{{instance}} used"),
              (f"capd_store_max_disk_bytes{{{DAEMON}}}", "{{instance}} max_disk")),
        lines("Quota", "The largest share of a quota that a run uses; from 90 % on only statistics are kept",
              "percentunit", (f"max by (run_id) (capd_run_quota_ratio{{{RUN}}})", "{{run_id}}")),
        lines("Free inodes", "Each series takes some", "short",
              (f"capd_store_free_inodes{{{DAEMON}}}", "{{instance}}")),
    ]),
    ("Uploads", HEIGHT, [
        lines("Upload rate", "Bytes written to the object store", "Bps",
              (rate("capd_upload_bytes_total", DAEMON), "{{instance}}")),
        lines("Objects", "Objects written to the object store", "ops",
              (rate("capd_upload_objects_total", DAEMON), "{{instance}}")),
        lines("Backlog", "Bytes of sealed shards that are not uploaded", "bytes",
              (f"capd_upload_backlog_bytes{{{DAEMON}}}", "{{instance}}")),
        lines("Oldest change", "The age of the oldest change that is not uploaded", "s",
              (f"capd_upload_oldest_seconds{{{DAEMON}}}", "{{instance}}")),
        lines("Upload failures", "Uploads that failed and are tried again, by reason", "ops",
              (f"sum by (reason) ({rate('capd_upload_failures_total', DAEMON)})", "{{reason}}")),
    ]),
]  # fmt: skip


def variable(name: str, query: str, label: str) -> dict[str, Any]:
    return {
        "name": name, "label": label, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2,
        "includeAll": True, "allValue": ".*", "multi": True, "sort": 1,
        "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard. `id` is Grafana's own, so it is null; `uid` is ours and stays."""
    return {
        "id": None,
        "uid": "capd-daemons",
        "title": "capd",
        "description": "The daemons of capd: health, throughput, drops, latency, memory and disk",
        "tags": ["capd"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                variable("instance", "label_values(capd_build_info, instance)", "Daemon"),
                variable("run_id", f"label_values(capd_run_info{{{DAEMON}}}, run_id)", "Run"),
            ]
        },
        "panels": list(_placed()),
    }


def _placed() -> Iterable[Panel]:
    y, identity = 0, 0
    for title, height, panels in ROWS:
        identity += 1
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        yield {
            "id": identity, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place
        }  # fmt: skip
        width = COLUMNS // len(panels)
        for at, one in enumerate(panels):
            identity += 1
            yield {
                "id": identity, **one, "gridPos": {"x": at * width, "y": y + 1, "w": width, "h": height}
            }  # fmt: skip
        y += 1 + height


def expressions(page: dict[str, Any]) -> list[str]:
    """Every expression of a dashboard, as Grafana sends it when all is chosen."""
    found = [target["expr"] for one in page["panels"] for target in one.get("targets", ())]
    for name, value in {
        "$__rate_interval": "5m", "$__range": "1h", "$instance": ".*", "$run_id": ".*",
    }.items():  # fmt: skip
        found = [expression.replace(name, value) for expression in found]
    return found


if __name__ == "__main__":
    PAGE.write_text(json.dumps(dashboard(), indent=2) + "\n")
