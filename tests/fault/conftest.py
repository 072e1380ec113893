"""The processes of the fault tests, and the figures they leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.kit import figures
from tests.fault.kit.site import Site
from tests.integration.conftest import daemon, start_rank

__all__ = ["daemon", "site", "start_rank"]


@pytest.fixture
def site(tmp_path: Path, runtime_dir: Path) -> Iterator[Site]:
    """A store in the test's directory."""
    site = Site(tmp_path, runtime_dir)
    yield site
    site.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if found := figures.lines():
        terminalreporter.section("figures of the fault tests")
        terminalreporter.write_line("\n".join(found))
        figures.write()
