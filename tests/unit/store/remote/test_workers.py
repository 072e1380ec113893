"""A series of an object store in the workers of a DataLoader."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import capd
from capd.errors import ObjectStoreError
from capd.store.objects.address import parse_address
from capd.store.read.series import Series
from tests.kit.objects.uploaded import filled, publish

data = pytest.importorskip("torch.utils.data", reason="DataLoader is of torch")


class Records(data.Dataset):  # type: ignore[misc, name-defined]  # it is not known before it is imported
    """The records of a series."""

    def __init__(self, series: Series) -> None:
        self.series = series

    def __len__(self) -> int:
        return len(self.series)

    def __getitem__(self, index: int) -> NDArray[np.generic]:
        return self.series.numpy(index)


# What a forked process has without a pickle.
HELD: list[Series] = []


def first() -> bytes:
    """The elements of the first record."""
    return HELD[0].numpy(0).tobytes()


def test_workers_read_a_series_or_say_why_they_cannot(tmp_path: Path) -> None:
    run = filled(tmp_path, count=3)
    place = publish(run, parse_address(f"file://{tmp_path}/there"))
    local, remote = (
        next(one for one in capd.open(where).series if one.key.tensor_name == "large")
        for where in (run, place)
    )
    loader = data.DataLoader(Records(remote), num_workers=1, multiprocessing_context="forkserver", timeout=60)
    np.testing.assert_array_equal(np.concatenate([np.asarray(batch) for batch in loader]), local.stack())
    HELD[:] = [remote]
    # The threads of obstore do not survive a fork. Without the check, the worker would wait for them.
    with (
        ProcessPoolExecutor(1, get_context("fork")) as pool,
        pytest.raises(ObjectStoreError, match=r'forked after .* multiprocessing_context="forkserver"'),
    ):
        pool.submit(first).result(60)
