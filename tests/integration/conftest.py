"""A daemon and ranks that do not outlive their test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import Daemon, Rank, StartRank


@pytest.fixture
def daemon(tmp_path: Path, runtime_dir: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "store", runtime_dir).start()
    yield daemon
    daemon.discard()


@pytest.fixture
def start_rank(daemon: Daemon) -> Iterator[StartRank]:
    """Starts ranks that do not outlive the test."""
    started: list[Rank] = []

    def start(number: int = 0, **settings: Any) -> Rank:
        started.append(Rank(daemon.endpoint, number, **settings))
        return started[-1]

    yield start
    for rank in started:
        rank.kill()
