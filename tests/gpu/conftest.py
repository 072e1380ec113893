"""What the GPU tests share: a daemon, and a job in a process of its own that captures to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.kit.gpu.job import Job, same_bits
from tests.kit.processes import Daemon


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here needs a GPU; those marked gpus(2) need as many."""
    missing = pytest.mark.skip(reason="needs a CUDA device")
    few = pytest.mark.skip(reason="needs two CUDA devices")
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(missing)
        elif "two_gpus" in item.fixturenames and torch.cuda.device_count() < 2:
            item.add_marker(few)


@pytest.fixture
def two_gpus() -> None:
    """For tests that need two devices: skipped where there are fewer."""


@pytest.fixture
def job(tmp_path: Path, runtime_dir: Path) -> Iterator[Job]:
    """A daemon with a store of its own, and what runs against it."""
    daemon = Daemon(tmp_path / "store", runtime_dir).start()
    yield Job(daemon, tmp_path)
    daemon.discard()


@pytest.fixture
def same() -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """See `same_bits`."""
    return same_bits
