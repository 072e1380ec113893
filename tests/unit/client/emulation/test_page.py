"""The code blocks of docs/emulation.md and docs/formats.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).resolve().parents[4] / "docs"


@pytest.mark.parametrize("page", ["emulation.md", "formats.md"])
def test_the_code_of_the_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)
    assert blocks
    names = {"x": torch.randn(32, 64).bfloat16()}
    for block in blocks:
        exec(compile(block, page, "exec"), names)  # noqa: S102  # our own page
    for said in re.findall(r"print\(.*?\)\s+# (.*)", "".join(blocks)):
        assert said in capsys.readouterr().out
