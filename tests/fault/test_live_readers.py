"""Readers beside a daemon at work, which moves records from log to shard to seal: a prefix, never a hole."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import xarray
import zarr

import capd
from tests.fault.kit import figures
from tests.fault.kit.journals import digest
from tests.fault.kit.load import LoadRank, capture
from tests.fault.kit.site import Site
from tests.kit.processes import capd as command

pytestmark = [pytest.mark.fault, pytest.mark.timeout(200)]

SECONDS = 5.0


def captured(rank: int, name: str, iteration: int) -> tuple[tuple[int, ...], str]:
    """Shape and digest of what was offered."""
    what = capture(rank, iteration)
    assert what.name == name
    return what.shape, digest(what.shape, what.payload)


def look_with_capd(site: Site) -> int:
    """Every record that is listed reads as it was captured, and the numbers of each series have no gap."""
    looked = 0
    for series in capd.open(site.run).series:
        for i in range(max(0, len(series) - 40), len(series)):
            record = series.records[i]
            bits = series.numpy(i)
            assert (bits.shape, digest(bits.shape, np.ascontiguousarray(bits).tobytes())) == captured(
                series.key.rank, series.key.tensor_name, record.iteration
            )
            looked += 1
        iterations = [record.iteration for record in series.records]
        assert iterations == sorted(set(iterations))
    return looked


def groups(site: Site) -> Iterator[str]:
    """Paths of the series, below the run."""
    for path in sorted(site.run.glob("*/rank*/*/*/*/zarr.json")):
        yield str(path.parent)


def look_with_zarr(site: Site) -> int:
    """What is published is whole: shape first, then the columns, which are published before it."""
    looked = 0
    for path in groups(site):
        array = zarr.open_array(f"{path}/data", mode="r")
        records = zarr.open_group(path, mode="r").attrs["capd"]["records"]
        assert records["count"] >= array.shape[0]
        if not array.shape[0]:
            continue
        iterations = (
            records["iteration"] if isinstance(records["iteration"], list) else [records["iteration"]]
        )
        key = zarr.open_group(path, mode="r").attrs["capd"]["key"]
        for number in range(max(0, array.shape[0] - 10), array.shape[0]):
            shape, expected = captured(key["rank"], key["tensor_name"], iterations[number % len(iterations)])
            block = np.asarray(array[number])[tuple(slice(0, n) for n in shape)]
            assert digest(shape, np.ascontiguousarray(block).tobytes()) == expected, f"{path}#{number}"
            looked += 1
    return looked


def look_with_xarray(site: Site) -> int:
    """xarray opens the published arrays."""
    looked = 0
    for path in groups(site):
        with xarray.open_zarr(path, consolidated=False) as opened:
            looked += int(opened["data"].sizes["record"])
    return looked


def look_with_verify(site: Site) -> int:
    """`capd verify` raises no false alarm."""
    done = command("verify", str(site.run), "--json", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return int(json.loads(done.stdout)["records"])


@pytest.mark.parametrize("look", [look_with_capd, look_with_zarr, look_with_xarray, look_with_verify])
def test_readers_beside_a_daemon_see_a_prefix(look: Callable[[Site], int], site: Site) -> None:
    assert site.start()
    rank = site.rank()
    rank.connect()
    rank.offer(30)
    rank.drain()
    site.seal()
    stop = threading.Event()
    failed: list[BaseException] = []
    worker = threading.Thread(target=keep_busy, args=(site, rank, stop, failed))
    worker.start()
    looks = looked = 0
    try:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            looked += look(site)
            looks += 1
    finally:
        stop.set()
        worker.join()
    assert not failed, failed
    assert looked > 0
    rank.bye()
    assert site.stop() == 0
    site.report()
    figures.note(f"readers during capture, {look.__name__}", looks=looks, records=looked, inconsistent=0)


def keep_busy(site: Site, rank: LoadRank, stop: threading.Event, failed: list[BaseException]) -> None:
    """Capture and seal in turns, so that records move all the time."""
    try:
        while not stop.wait(0.02):
            rank.offer(5)
            rank.drain()
            if rank.next % 25 == 0:
                site.seal()
    except BaseException as error:  # the main thread reports it
        failed.append(error)
