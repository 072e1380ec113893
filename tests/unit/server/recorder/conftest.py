"""The memory of the node is a directory of the test."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def shared_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in place of /dev/shm."""
    place = tmp_path_factory.mktemp("shm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("capd.store.keeps.held_files.SHARED_MEMORY", place)
        yield place
    # Files of the spool close with their last reader, and not in the midst of another test.
    gc.collect()
