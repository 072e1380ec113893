"""`capd merge`: disjoint runs are linked, later attempts counted on, equal captures taken once, others refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import capd as reader
from capd_client.protocol.key import Moment
from tests.kit.store.cli import CLIENT, Result, StoreWriter, linear_key, run_capd, session_row
from tests.kit.tiers import rows

Capd = Callable[..., Result]
RNG = np.random.default_rng(12)
STEPS = (
    "copy.after_file", "copy.after_series", "copy.after_files", "recover.after_partials", "recover.after_logs",
    "commit.after_write", "log.after_write", "settle.after_append", "seal.after_index", "seal.after_rename",
    "copy.after_records", "copy.after_verify", "copy.after_publish",
)  # fmt: skip


def fill(root: Path, *, rank: int = 0, client: bytes = CLIENT, seed: int = 0, steps: int = 2) -> Path:
    """A run of one rank, with a small and a large series."""
    rng = np.random.default_rng(seed)
    writer = StoreWriter(root)
    writer.client = client
    for step in range(steps):
        for name, shape in (("input", (16, 16)), ("weight", (512, 256))):
            bits = rng.normal(size=shape).astype("f4")
            key = linear_key(tensor_name=name, rank=rank)
            writer.put("run", key, bits, "float32", Moment(iteration=step, time_ns=3))
    writer.save_session("run", session_row(client=client, rank=rank, offered=2 * steps, committed=2 * steps))
    writer.close()
    return root / "run.zarr"


def bits_of(run: Path) -> dict[tuple[int, str, int, int], bytes]:
    """The bits of all records by rank, name, iteration and attempt; no two have the same."""
    found: dict[tuple[int, str, int, int], bytes] = {}
    for series in reader.open(run).everything():
        for n in series.numbers:
            moment = series.row(n).moment
            at = (series.key.rank, series.key.tensor_name, moment.iteration, moment.attempt)
            assert at not in found
            found[at] = series.read(n).tobytes()
    return found


def shifted(run: Path, shift: int) -> dict[tuple[int, str, int, int], bytes]:
    return {(*at[:3], at[3] + shift): bits for at, bits in bits_of(run).items()}


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two jobs of one rank."""
    return fill(tmp_path / "a"), fill(tmp_path / "b", client=b"b" * 16, seed=1)


def test_disjoint_ranks_are_linked_and_keep_their_attempts(capd: Capd, tmp_path: Path) -> None:
    a, b = fill(tmp_path / "a"), fill(tmp_path / "b", rank=1, client=b"b" * 16, seed=1)
    new = tmp_path / "new.zarr"
    done = capd("merge", a, b, "-o", new, "--json")

    assert done.code == 0, done.err
    assert [one["linked_series"] for one in done.json["sources"]] == [2, 2]
    assert [one["shift"] for one in done.json["sources"]] == [0, 0]
    assert bits_of(new) == bits_of(a) | bits_of(b)
    shards = list(new.glob("*/rank*/*/*/*/data/c/0/0/0"))
    assert len(shards) == 4
    assert all(path.stat().st_nlink == 2 for path in shards)
    assert {row.rank for row in reader.open(new).sessions} == {0, 1}
    assert capd("verify", new).code == 0


def test_a_linked_run_and_its_source_change_apart(capd: Capd, tmp_path: Path) -> None:
    a, b = fill(tmp_path / "a"), fill(tmp_path / "b", rank=1, client=b"b" * 16, seed=1)
    new = tmp_path / "new.zarr"
    assert capd("merge", a, b, "-o", new).code == 0
    before = bits_of(a)
    for root, run_id in ((tmp_path, "new"), (tmp_path / "b", "run")):
        writer = StoreWriter(root)
        writer._sequence = 100
        key = linear_key(rank=1 if run_id == "run" else 0)
        writer.put(run_id, key, np.ones((16, 16), "f4"), "float32", Moment(iteration=50))
        writer.close()
    assert bits_of(a) == before
    assert len(bits_of(new)) == 9
    assert len(bits_of(b)) == 5
    for run in (a, b, new):
        assert capd("verify", run).code == 0


def test_a_job_that_repeats_ranks_and_attempts_becomes_the_next_attempt(
    capd: Capd, two: tuple[Path, Path], tmp_path: Path
) -> None:
    new = tmp_path / "new.zarr"
    done = capd("merge", *two, "-o", new, "--json")
    assert done.code == 0, done.err
    assert [one["shift"] for one in done.json["sources"]] == [0, 1]
    assert bits_of(new) == bits_of(two[0]) | shifted(two[1], 1)
    assert sorted(row.attempt for row in reader.open(new).sessions) == [0, 1]
    assert sum(map(len, reader.open(new).find())) == 4
    assert capd("verify", new).code == 0


def test_a_dry_run_writes_nothing(capd: Capd, two: tuple[Path, Path], tmp_path: Path) -> None:
    done = capd("merge", *two, "-o", tmp_path / "new.zarr", "--dry-run")
    assert done.code == 0
    assert "+1" in done.out
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_equal_captures_of_a_copy_that_went_on_are_taken_once(capd: Capd, tmp_path: Path) -> None:
    a = fill(tmp_path / "a")
    b = fill(tmp_path / "b", steps=3)  # the same rank, with one more step
    new = tmp_path / "new.zarr"
    done = capd("merge", a, b, "-o", new, "--json")
    assert done.code == 0, done.err
    assert [one["repeated"] for one in done.json["sources"]] == [0, 4]
    assert bits_of(new) == bits_of(b)
    assert capd("verify", new).code == 0


def test_one_capture_with_different_bytes_is_refused_before_anything_is_written(
    capd: Capd, tmp_path: Path
) -> None:
    a, b = fill(tmp_path / "a"), fill(tmp_path / "b", seed=1)
    done = capd("merge", a, b, "-o", tmp_path / "new.zarr")
    assert done.code == 1
    assert "one capture with different bytes" in done.err
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_what_cannot_be_merged_is_refused(capd: Capd, two: tuple[Path, Path], tmp_path: Path) -> None:
    new = tmp_path / "new.zarr"
    assert capd("merge", two[0], "-o", new).code == 2
    assert capd("merge", two[0], two[0], "-o", new).code == 2
    assert capd("merge", two[0], tmp_path, "-o", new).code == 1
    assert capd("merge", *two, "-o", two[0]).code == 2
    assert not new.exists()


@pytest.mark.parametrize("step", rows(STEPS, ["copy.after_file", "log.after_write", "copy.after_publish"]))
def test_a_merge_killed_at_any_step_is_invisible_and_the_next_call_completes_it(
    two: tuple[Path, Path], tmp_path: Path, step: str
) -> None:
    new = tmp_path / "new.zarr"
    before = [bits_of(run) for run in two]
    killed = run_capd("merge", *two, "-o", new, CAPD_FAILPOINTS=f"{step}=kill")
    assert killed.code == -signal.SIGKILL, f"{step} was not reached: {killed.err}"
    assert new.exists() == (step == "copy.after_publish")
    done = run_capd("merge", *two, "-o", new)
    assert done.code == 0, done.err
    assert bits_of(new) == before[0] | shifted(two[1], 1)
    assert [bits_of(run) for run in two] == before
    assert not new.with_name(".new.zarr.copy").exists()
    for run in (*two, new):
        assert run_capd("verify", run).code == 0
