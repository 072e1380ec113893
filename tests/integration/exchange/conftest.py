"""A captured run of two layers, and its export, for the tests of other tools' files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.jobs.products import assert_products_hold

JOB = Path(__file__).with_name("two_layers.py")
Capture = Callable[..., Path]


@pytest.fixture(scope="package")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """`captured("scaled")` trains the model under `capd run` with these words, once, and returns its run."""
    root = tmp_path_factory.mktemp("captured")
    runs: dict[tuple[str, ...], Path] = {}

    def run(*words: str) -> Path:
        if words not in runs:
            name = "-".join(("run", *words))
            _capd(
                "run",
                "--store",
                root,
                "--run-id",
                name,
                "--policy",
                "block",
                "--",
                sys.executable,
                JOB,
                *words,
            )
            assert_products_hold(root / f"{name}.zarr")
            runs[words] = root / f"{name}.zarr"
        return runs[words]

    return run


@pytest.fixture(scope="package")
def exported(captured: Capture, tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """`exported("scaled")` is the msprobe dump of that run."""
    dumps: dict[tuple[str, ...], Path] = {}

    def export(*words: str) -> Path:
        if words not in dumps:
            dumps[words] = tmp_path_factory.mktemp("dump") / "dump"
            _capd("export", captured(*words), "--to", "msprobe", "-o", dumps[words])
        return dumps[words]

    return export


def _capd(*arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "capd", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
