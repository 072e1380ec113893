"""What is shipped for Grafana and Prometheus: the dashboard is whole, and the alerts fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from itertools import combinations
from typing import Any

import promql_parser
import pytest
import yaml

from capd.drops import REQUESTED
from tests.kit.metrics.scrape import samples
from tests.kit.paths import REPOSITORY
from tests.repo.dashboard import PAGE, dashboard, expressions
from tests.unit.server.metrics.test_text import page, run

RULES = REPOSITORY / "deploy" / "prometheus" / "capd.rules.yml"
RULES_TEST = RULES.with_name("capd.rules.test.yml")
DOCUMENT = REPOSITORY / "docs" / "metrics.md"
# What the dashboard leaves to tables of one's own.
NOT_SHOWN = {
    "capd_uptime_seconds", "capd_runs_omitted", "process_start_time_seconds", "capd_rank_records_offered_total",
    "capd_rank_records_committed_total", "capd_rank_records_dropped_total", "capd_rank_records_in_flight",
    "capd_rank_iteration",
}  # fmt: skip
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed"
)


@pytest.fixture(scope="module")
def shipped() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PAGE.read_text())
    return found


def metrics_of_a_page() -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in samples(page(run()))}


def alert_expressions() -> dict[str, str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def test_the_dashboard_is_what_its_description_makes(shipped: dict[str, Any]) -> None:
    assert shipped == dashboard(), "run `python -m tests.repo.dashboard`"


def test_the_dashboard_can_be_provisioned_as_a_file(shipped: dict[str, Any]) -> None:
    assert (shipped["id"], shipped["uid"], "__inputs" in shipped) == (None, "capd-daemons", False)
    assert [one["name"] for one in shipped["templating"]["list"]] == ["datasource", "instance", "run_id"]
    sources = [
        one["datasource"]
        for one in (*shipped["panels"], *shipped["templating"]["list"])
        if "datasource" in one
    ]
    assert {source["uid"] for source in sources} == {"${datasource}"}


def test_panels_have_ids_of_their_own_and_do_not_overlap(shipped: dict[str, Any]) -> None:
    panels = shipped["panels"]
    places = [one["gridPos"] for one in panels]

    assert max(Counter(one["id"] for one in panels).values()) == 1
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    assert [(a, b) for a, b in combinations(places, 2) if overlap(a, b)] == []


def overlap(a: dict[str, int], b: dict[str, int]) -> bool:
    return all(a[at] < b[at] + b[size] and b[at] < a[at] + a[size] for at, size in (("x", "w"), ("y", "h")))


def test_every_panel_has_a_title_a_text_a_unit_and_expressions_for_the_chosen_daemons(
    shipped: dict[str, Any],
) -> None:
    panels = [one for one in shipped["panels"] if one["type"] != "row"]

    for one in panels:
        assert one["title"], one
        assert one["description"], one
        assert one["fieldConfig"]["defaults"]["unit"], one
        assert [target["expr"] for target in one["targets"] if "$instance" not in target["expr"]] == []
        refs = [target["refId"] for target in one["targets"]]
        assert len(refs) == len(set(refs)) > 0


def test_every_expression_is_promql(shipped: dict[str, Any]) -> None:
    found = [*expressions(shipped), *alert_expressions().values()]

    assert len(found) > 40
    for expression in found:
        promql_parser.parse(expression)


def test_every_metric_is_on_the_dashboard_or_left_out_on_purpose(shipped: dict[str, Any]) -> None:
    words = set(re.findall(r"\b(?:capd|process)_\w+", "\n".join(expressions(shipped))))
    shown = {re.sub(r"_bucket$", "", word) for word in words}

    assert metrics_of_a_page() - shown == NOT_SHOWN
    assert shown <= metrics_of_a_page()


def test_alerts_use_metrics_that_exist() -> None:
    words = set(re.findall(r"\bcapd_\w+", "\n".join(alert_expressions().values())))

    assert words <= metrics_of_a_page()


def test_what_the_settings_leave_out_is_no_loss_in_the_alerts() -> None:
    chosen = re.findall(r'reason!~"([^"]*)"', alert_expressions()["CapdRecordsLost"])

    assert chosen
    assert {frozenset(one.split("|")) for one in chosen} == {REQUESTED}


def test_the_page_about_metrics_names_every_metric_and_every_alert() -> None:
    text = DOCUMENT.read_text()

    assert {name for name in metrics_of_a_page() if f"`{name}`" not in text} == set()
    assert {name for name in alert_expressions() if f"`{name}`" not in text} == set()


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    checked = subprocess.run(
        ["promtool", "check", "rules", "--lint-fatal", str(RULES)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_promtool
def test_each_alert_fires_when_it_should_and_only_then() -> None:
    tested = yaml.safe_load(RULES_TEST.read_text())["tests"]
    cases = [case for test in tested for case in test["alert_rule_test"]]
    checked = subprocess.run(
        ["promtool", "test", "rules", str(RULES_TEST)], capture_output=True, text=True, check=False
    )

    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(alert_expressions())
    assert checked.returncode == 0, checked.stdout + checked.stderr
