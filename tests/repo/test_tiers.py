"""What the default tier covers: every promise of docs/guarantees.md."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.kit.paths import REPOSITORY

GUARANTEES = REPOSITORY / "docs" / "guarantees.md"
NOT_IN_IT = ("tests/fault/", "tests/gpu/")
"""Where tests lie that no machine runs in minutes, or that need a device."""

Test = tuple[str, str]  # file, function


def promises() -> Iterator[tuple[str, set[Test]]]:
    """Each section of the page, and each row of its tables, with the tests that it names."""
    section, named = "", set[Test]()
    for line in GUARANTEES.read_text().splitlines():
        if line.startswith("#"):
            yield section, named
            section, named = line, set()
        file, mine = "", set[Test]()
        for word in re.findall(r"`([^`]+)`", line):
            if word.startswith("tests/") and word.endswith(".py"):
                file = word
            elif file and word.startswith("test_"):
                mine.add((file, word))
        named |= mine
        if line.startswith("|"):
            yield line[:100], mine
    yield section, named


@pytest.mark.slow  # it imports all tests
@pytest.mark.timeout(300)
def test_every_promise_has_a_test_in_the_default_tier() -> None:
    command = ["-m", "pytest", "--collect-only", "-q", "-m", "not slow and not fault and not gpu"]
    done = subprocess.run(
        [sys.executable, *command, "-p", "no:cacheprovider"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip
    names = (line.partition("[")[0].split("::") for line in done.stdout.splitlines() if "::" in line)
    default = {(name[0], name[-1]) for name in names}

    told = [(promise, tests) for promise, tests in promises() if tests]
    assert len(told) > 50
    lacking = [
        promise
        for promise, tests in told
        if not tests & default and not all(file.startswith(NOT_IN_IT) for file, _ in tests)
    ]
    assert lacking == []
