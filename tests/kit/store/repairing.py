"""Repairs a damaged run in a test, and checks what every repair promises."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np

import capd
from capd.errors import CapdError, DamagedRecord
from capd.store.repair.repair import repair
from capd.store.repair.result import Repair
from capd.store.verify.run import verify_run
from capd_client.protocol.key import Moment
from tests.kit.store.reading import Held, assert_capd_reads, assert_zarr_readers_read
from tests.kit.store.writing import Writer, key

_MOMENT = Moment.__struct_fields__
_RNG = np.random.default_rng(13)
Made = tuple[Path, Held]  # a run, and the records that it has
Read = dict[tuple[Any, ...], tuple[Any, ...]]


def put_all(writer: Writer, count: int) -> None:
    """Put large records, and twenty small ones at each iteration."""
    for iteration in range(count):
        writer.put(
            key("large"), "float32", _RNG.standard_normal((300, 400)).astype("f4"), iteration=iteration
        )
        for call in range(20):
            bits = _RNG.standard_normal((250, 64)).astype("f4")  # 16 records share a chunk
            writer.put(key("small"), "float32", bits, iteration=iteration, call=call)


def state(run: Path) -> dict[str, tuple[int, bytes]]:
    """Names, modification times and bytes of everything in a run."""
    return {
        str(path.relative_to(run)): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [run, *run.rglob("*")]
    }


def readable(run: Path) -> Read:
    """All records that capd reads from a run: everything that a reader sees of them, by key and moment."""
    found: Read = {}
    with contextlib.suppress(CapdError, OSError):  # a run that does not open
        for series in capd.open(run).series:
            for number in range(len(series)):
                with contextlib.suppress(DamagedRecord):
                    record, bits = series.records[number], series.read(number)
                    said = (record.metadata, record.attributes, record.device, record.requires_grad)
                    moment = tuple(getattr(record, name) for name in _MOMENT)
                    found[series.key, series.dtype, series.kept, moment] = (
                        *said, record.is_leaf, record.shape, record.stats, bits.shape, bits.tobytes(),
                    )  # fmt: skip
    return found


def repaired(run: Path) -> tuple[Repair, Path]:
    """Repair a run; the damaged one is untouched, and every record that capd read there is in the new one."""
    reads, before = readable(run), state(run)
    new = run.parent / "repaired" / "new.zarr"

    done = repair(run, new)

    assert state(run) == before
    assert [str(damage) for damage in verify_run(new).damaged] == []
    now = readable(new)
    assert len(now) == done.saved
    assert {what: now.get(what) for what in reads} == reads
    assert [path.name for path in new.parent.iterdir()] == ["new.zarr"]
    return done, new


def is_whole(run: Path, held: Held) -> None:
    """The run is sound and has exactly these records, for capd and for readers that know nothing of it."""
    assert [str(damage) for damage in verify_run(run).damaged] == []
    assert_capd_reads(run, held)
    assert_zarr_readers_read(run, held)


def lost(done: Repair) -> dict[str, list[int]]:
    """Numbers of the lost records by the tensor's name."""
    found: dict[str, list[int]] = {}
    for one in done.lost:
        found.setdefault(one.key.tensor_name, []).append(one.number)
    return found
