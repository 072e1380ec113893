"""Fixtures of the repair tests: a sealed run, and a copy of it that a test may damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.kit.store.repairing import Made, put_all
from tests.kit.store.writing import Writer


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A sealed run: five large records in three shards, a hundred small ones in seven shards of one chunk."""
    writer = Writer(tmp_path_factory.mktemp("made"), shard_nbytes=1 << 20)
    put_all(writer, 5)
    writer.close()
    return writer.run, writer.held


@pytest.fixture
def run(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, to be damaged."""
    monkeypatch.setattr("capd.store.verify.run._SECOND_LOOK_S", 0.01)
    shutil.copytree(made[0], tmp_path / "run.zarr")
    return tmp_path / "run.zarr"
