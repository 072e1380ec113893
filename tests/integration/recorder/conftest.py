"""A run with a flight recorder whose daemons and ranks do not outlive their test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from capd.server.recorder.spool import HeldFiles
from capd.window.settings import WindowSettings
from tests.integration.recorder.told_ranks import Recording
from tests.kit.daemon import daemons


@pytest.fixture
def recording(runtime_dir: Path) -> Iterator[Recording]:
    """A run in a directory whose socket paths are short."""
    with daemons() as made:
        recording = Recording(runtime_dir, made)
        yield recording
        for rank in recording.ranks:
            rank.kill()
    # What a killed daemon held in /dev/shm would stay there. The next one removes what has lost its run.
    shutil.rmtree(recording.store, ignore_errors=True)
    for node in recording.nodes:
        HeldFiles(WindowSettings(iterations=1), recording.store, node, lambda _: None).close()
