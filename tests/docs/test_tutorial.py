"""Every line of the tutorial does what it says, in the order of the page."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs import blocks
from tests.kit.paths import REPOSITORY

PAGE = REPOSITORY / "docs" / "tutorial.md"
LANGUAGES = ("bash", "python")


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_every_line_of_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = blocks.commands(tmp_path / "bin")
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    monkeypatch.chdir(tmp_path)
    session: dict[str, Any] = {}
    ran = 0

    for block in blocks.blocks(PAGE):
        if block.language == "bash":
            blocks.run_bash(block, tmp_path, environ)
        elif block.language == "python":
            blocks.run_python(block.text, block.place, session)
        ran += block.language in LANGUAGES
    session.clear()
    gc.collect()

    assert ran > 8
    assert (tmp_path / "report.html").stat().st_size > 100_000
    assert {run.name for run in (tmp_path / "captures").glob("*.zarr")} == {"first.zarr", "mxfp8.zarr"}


def without_comments(text: str) -> list[str]:
    return [line for row in text.splitlines() if (line := re.sub(r"(^|\s+)# .*", "", row))]


def test_the_chinese_tutorial_shows_the_same_commands() -> None:
    chinese = [block for block in blocks.blocks(PAGE.with_suffix(".zh.md")) if block.language in LANGUAGES]
    english = [block for block in blocks.blocks(PAGE) if block.language in LANGUAGES]

    assert [(block.language, without_comments(block.text)) for block in chinese] == [
        (block.language, without_comments(block.text)) for block in english
    ]
