"""Stores of several runs for the commands about whole runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.store.removing import age, small_run


@pytest.fixture(scope="session")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two series."""
    return small_run(tmp_path_factory.mktemp("lifecycle"), "a", command="python train.py --lr 1")


@pytest.fixture
def many(one_run: Path, tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that makes a store of copies: `many(a=40, b=1)` has runs that changed so many days ago."""

    def make(**days: float) -> Path:
        root = tmp_path / "captures"
        root.mkdir()
        for name, old in days.items():
            shutil.copytree(one_run, root / f"{name}.zarr", copy_function=shutil.copy2)
            age(root / f"{name}.zarr", old)
        return root

    return make
