"""The report's first page in a real browser: the sentences of the verdict, and the one colour scale of its table."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from capd.analyze.format_choice import DEFAULT_CHOICES
from capd.analyze.verdict.levels import Levels
from capd.analyze.verdict.roles import JUDGED
from capd.analyze.verdict.score import RoleScores, Score
from capd.analyze.verdict.sentences import sentence_of
from capd.analyze.verdict.statements import Statement, statements_of
from capd.phrase import phrase_text, plain_phrase
from capd.report.document import document
from capd.report.gather import GatheredRecords
from capd.report.page.data import page_data
from capd.report.page.html import page_html
from capd_client.formats.spec import spec_of
from tests.browser.conftest import Opened

Open = Callable[..., Opened]
VERDICTS: dict[str, dict[str, tuple[float, float, float]]] = {
    "lost": {"fp16": (11, 60, 60), "mxfp8": (31, 31, 30)},
    "losses": {"fp8": (31.5, 31.24, 31), "hifp8": (31, 31, 20.06), "mxfp4": (18, 18, 18)},
    "bits": {"mxfp8": (31, 31, 31), "mxfp4": (18, 18, 18)},
    "close": {"fp8": (31, 31, 31), "mxfp8": (31.39, 31.4, 31.5)},
    "even": {"fp8": (31, 31, 31), "mxfp8": (31, 31, 31)},
    "source": {"bf16": (math.inf, math.inf, math.inf), "mxfp8": (31, 31, 31)},
    "one": {"hifp8": (31, 30, 12.34)},
    "all lost": {"fp16": (11, 11, 11)},
    "poor": {"fp8": (31, 31, 3), "mxfp4": (31, 31, 2)},
    "few": {"fp8": (31, 31, 31), "nvfp4": (20, 20, 20)},
}
"""SQNR on each role by format; 11 dB have lost values. nvfp4 did not take all tensors, and none of the last role."""

RULES = {
    "choice", "poor", "weak", "all_lose", "loses_values", "loses_db", "all_close", "uneven", "untaken", "zeros",
    "not_finite", "source", "missing",
}  # fmt: skip


def statements(table: dict[str, tuple[float, float, float]], error: float = 0.0) -> list[Statement]:
    roles = [
        RoleScores(
            role,
            [
                Score(
                    label, spec_of(label, {}).bits_per_value, Levels(10, row[place], row[place], error, poor=1), 4096,
                    lost=1234 if row[place] == 11 else 0,
                    taken=10 if label != "nvfp4" else 9 * (place < 2),
                    is_scaled=spec_of(label, {}).is_scaled,
                    is_source=label == "bf16",
                    saturation_percent=9.66 if label == "mxfp8" else 0.0,
                    flush_percent=40.0 if label == "hifp8" else 0.0,
                )
                for label, row in table.items()
            ],
            tensors=10, zeros=2, records=40, left_out=3,
        )
        for place, role in enumerate(JUDGED)
    ]  # fmt: skip
    return statements_of(roles)


def test_the_page_says_the_sentences_of_the_verdict(opened: Open, tmp_path: Path) -> None:
    """Every rule of the verdict, in the page's own words."""
    plain = document(["run.zarr"], GatheredRecords(), quick=False)
    data = page_data(plain, GatheredRecords(), files=True, choices=DEFAULT_CHOICES)
    rules = [one for table in VERDICTS.values() for error in (0.0, 0.1) for one in statements(table, error)]
    rules.append({"rule": "missing", "roles": list(JUDGED)})
    assert {one["rule"] for one in rules} == RULES
    said = [sentence_of(one) for one in rules]
    some = {"format": "fp8", "bits_per_value": 8, "roles": {}, "products": {}}
    data["verdict"] = {
        **data["verdict"],
        "formats": [some],
        "statements": [plain_phrase(one) for one in said],
    }
    out = tmp_path / "said.html"
    out.write_bytes(page_html(data))

    shown = opened(out, width=400)

    assert shown.page.locator(".statements p").all_inner_texts() == [phrase_text(one) for one in said]
    shown.choose("language", "中文")
    chinese = shown.page.locator(".statements p").all_inner_texts()
    assert len(chinese) == len(said)
    assert all(one.endswith("。") for one in chinese)
    # Only the names of formats, units and values are not Chinese.
    names = {*(label for table in VERDICTS.values() for label in table), "dB", "tensor", "Inf", "NaN"}
    assert {each for one in chinese for each in re.findall("[A-Za-z]\\w*", one)} <= names
    assert "不带缩放因子的 hifp8 在梯度上比 fp8 低 10.9 dB；有 40 % 的值低于它的最小正规数。" in chinese


def test_a_few_tenths_of_a_db_look_alike(opened: Open, tmp_path: Path) -> None:
    """The colour scale covers at least 6 dB: 31.2 and 31.5 dB have nearly one colour, 25 and 31 dB do not."""
    colours = []
    for levels in ((31.5, 31.2), (31.5, 25.5)):
        plain = document(["run.zarr"], GatheredRecords(), quick=False)
        data = page_data(plain, GatheredRecords(), files=True, choices=DEFAULT_CHOICES)
        errors = {
            "tensors": 1, "lost": 0, "underflow_percent": 0, "saturation_percent": 0, "tenth_sqnr_db_error": 0,
        }  # fmt: skip
        data["verdict"]["formats"] = [
            {"format": "fp8", "bits_per_value": 8, "products": {},
             "roles": {role: {**errors, "tenth_sqnr_db": level} for role, level in zip(JUDGED, levels, strict=False)}}
        ]  # fmt: skip
        out = tmp_path / f"{levels[1]}.html"
        out.write_bytes(page_html(data))
        shades = "cells => cells.map((cell) => cell.style.backgroundColor.match(/\\d+/g).map(Number))"
        found = opened(out).page.locator(".verdict td[style]").evaluate_all(shades)
        colours.append(np.abs(np.subtract(*found)).max())
    assert colours[0] < 40 < 120 < colours[1]
