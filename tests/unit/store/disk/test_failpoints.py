"""The names of failpoints are those that the code passes: tests kill at each name and see that it was reached."""

from __future__ import annotations

import re

from capd.store.disk import failpoints
from tests.kit.paths import REPOSITORY


def test_every_failpoint_has_a_name_and_every_name_a_failpoint() -> None:
    sources = [path for path in (REPOSITORY / "capd").rglob("*.py") if path.name != "failpoints.py"]
    texts = [path.read_text() for path in sources]
    passed = {name for text in texts for name in re.findall(r'failpoint\("([^"]+)"\)', text)}
    assert passed <= set(failpoints.NAMES)
    # Stages of an upload have theirs in a table.
    assert {name for name in failpoints.NAMES if not any(f'"{name}"' in text for text in texts)} == set()
