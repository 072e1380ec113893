"""The start-up files of a job's Pythons, imported as those do: from their own directory."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from capd.cli.jobs.startup import BOOTSTRAP


@pytest.fixture(autouse=True, scope="session")
def _startup_files_can_be_imported() -> Iterator[None]:
    sys.path.append(str(BOOTSTRAP))
    yield
    sys.path.remove(str(BOOTSTRAP))
