"""A series of an object store in the workers of a DataLoader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

import capd
from capd.errors import ObjectStoreError
from capd.store.objects.address import parse_address
from capd.store.read.series import Series
from tests.kit.objects.uploaded import filled, publish


class Records(Dataset[NDArray[np.generic]]):
    """The records of a series."""

    def __init__(self, series: Series) -> None:
        self.series = series

    def __len__(self) -> int:
        return len(self.series)

    def __getitem__(self, index: int) -> NDArray[np.generic]:
        return self.series.numpy(index)


def loaded(series: Series, start: str) -> NDArray[np.generic]:
    """All records, as one worker that was started this way reads them."""
    loader = DataLoader(Records(series), num_workers=1, multiprocessing_context=start, timeout=60)
    return np.concatenate([np.asarray(batch) for batch in loader])


def refusal(series: Series) -> str:
    """What a forked worker says. The exception would keep the worker."""
    try:
        loaded(series, "fork")
    except ObjectStoreError as error:
        return str(error)
    return ""


def test_workers_read_a_series_or_say_why_they_cannot(tmp_path: Path) -> None:
    run = filled(tmp_path, count=3)
    place = publish(run, parse_address(f"file://{tmp_path}/there"))
    local, remote = (
        next(one for one in capd.open(where).series if one.key.tensor_name == "large")
        for where in (run, place)
    )
    np.testing.assert_array_equal(loaded(remote, "forkserver"), local.stack())
    # The threads of obstore do not survive a fork. Without the check, the worker would wait for them.
    said = refusal(remote)
    assert "forked after the first use" in said
    assert 'multiprocessing_context="forkserver"' in said
