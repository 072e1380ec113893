"""The file that the page is: what it holds, what it lets run, and that no name within it is markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import pytest

from capd.report.document import document
from capd.report.gather import GatheredRecords
from capd.report.page.data import page_data
from capd.report.page.html import page_html
from tests.kit.paths import REPOSITORY

ASSETS = REPOSITORY / "capd" / "report" / "assets"
HOSTILE = "</script><!--<script>alert(1)</script>\u2028\"'&\ud800"


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    plain = document(["run.zarr"], GatheredRecords(), quick=True)
    return page_data(plain, GatheredRecords(), files=True)


def test_the_policy_lets_exactly_the_scripts_and_the_style_of_the_file_run(data: dict[str, Any]) -> None:
    page = page_html(data).decode()
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    scripts = re.findall(r'<script(?: type="module")?>(.*?)</script>', page, re.DOTALL)
    style = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert rules["default-src"] == "'none'"
    assert rules["script-src"].split() == [hashed(one) for one in scripts]
    assert rules["style-src"].split() == [hashed(one) for one in style]
    assert len(scripts) == 2


def hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_nothing_is_loaded_from_anywhere_and_the_library_keeps_its_licence(data: dict[str, Any]) -> None:
    page = page_html(data).decode()
    assert re.findall(r'(?:src|href)="([^"]*)"', page.split("<script", 1)[0]) == ["data:,", "#"]
    assert not re.findall(r"^import |^export |\bimport\(", page, re.MULTILINE)
    assert "Copyright (c) 2022 Leon Sorokin" in page


def test_no_name_ends_a_script_and_all_come_back_as_they_were(data: dict[str, Any]) -> None:
    page = page_html({**data, "title": HOSTILE, "sources": [HOSTILE]}).decode()
    [embedded] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert "<" not in embedded
    assert json.loads(embedded)["sources"] == [HOSTILE]
    assert "<script>alert" not in page


def test_a_number_that_json_does_not_have_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        page_html({**data, "series_total": float("nan")})


def test_scripts_make_no_markup_of_text() -> None:
    for script in ASSETS.rglob("*.js"):
        if not script.name.startswith("uPlot"):
            source = script.read_text(encoding="utf-8")
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", source)
