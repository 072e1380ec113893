"""The parts of a cluster that need none: the tree of merges, and the checkpoint."""

from __future__ import annotations

import os
import random
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from capd._version import __version__
from capd.distributed.cluster.checkpoint import Checkpoint
from capd.distributed.cluster.checks import check_memory
from capd.distributed.cluster.scratch import scratch_directory
from capd.distributed.cluster.settings import ClusterSettings
from capd.distributed.cluster.tree import FAN_IN, MergeTree
from capd.distributed.cluster.verifying import checks_on
from capd.distributed.cluster.workers import TaskError, guarded
from capd.errors import CapdError, ConfigError, StoreBusy
from capd.store.verify.run import verify_run
from tests.kit.cluster.sources import varied_run

PLAN = "0123456789abcdef" * 2


@pytest.mark.parametrize("leaves", [1, 2, 8, 9, 64, 65, 200])
def test_a_tree_merges_each_leaf_once_in_order_a_few_at_a_time(leaves: int) -> None:
    tree = MergeTree(leaves)
    order = list(range(leaves))
    random.Random(leaves).shuffle(order)
    for leaf in order:
        assert tree.root is None
        for _ in range(2):
            group = tree.add(0, leaf, bytes([leaf]))
            while group is not None:
                assert 2 <= len(group.results) <= FAN_IN
                group = tree.add(group.level, group.place, b"".join(group.results))

    assert tree.root == bytes(range(leaves))


def test_a_checkpoint_has_all_that_was_added_and_nothing_that_was_cut_off(tmp_path: Path) -> None:
    place = tmp_path / "new" / "checkpoint"
    with Checkpoint(place, PLAN) as log:
        log.add(3, b"three" * 100)
        log.add(0, b"")
    whole = (place / "partials.log").read_bytes()

    for cut in (0, 1, 15, 16):
        (place / "partials.log").write_bytes(whole[: len(whole) - cut])
        with Checkpoint(place, PLAN) as log:
            assert log.result(3) == b"three" * 100
            assert log.tasks == ({0, 3} if cut == 0 else {3})
            log.add(5, b"five")
        with Checkpoint(place, PLAN) as log:
            assert (log.result(5), log.result(3)) == (b"five", b"three" * 100)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE((place / "partials.log").stat().st_mode) == 0o600


def test_a_checkpoint_whose_begin_was_cut_off_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "partials.log"
    with Checkpoint(tmp_path, PLAN):
        whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with Checkpoint(tmp_path, PLAN) as log:
            log.add(1, b"one")
        with Checkpoint(tmp_path, PLAN) as log:
            assert (log.tasks, log.result(1)) == ({1}, b"one")


def test_what_killed_commands_left_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_directory() as held:
        left, young = (Path(tempfile.mkdtemp(prefix=f"{held}-")) for _ in range(2))
        other = Path(tempfile.mkdtemp(prefix="capd-dask-elsewhere-"))
        link = Path(f"{held}-link")
        link.symlink_to(other)
        (left / "file").touch()
        for path in (Path(held), left, other):
            os.utime(path, (0, 0))
        with scratch_directory() as own:
            assert set(tmp_path.iterdir()) == {Path(held), young, other, link, Path(own)}
    assert set(tmp_path.iterdir()) == {young, other, link}


def deep() -> bytes:
    return deep()


def test_errors_of_tasks_can_be_sent() -> None:
    assert guarded(__version__, bytes, b"found") == b"found"
    with pytest.raises(TaskError, match="RecursionError") as failed:
        guarded(__version__, deep)
    assert len(failed.traceback) < 5
    assert failed.value.__context__ is None
    with pytest.raises(TaskError, match="install the same versions everywhere"):
        guarded("0.0.1", bytes, b"found")


def test_a_worker_that_checks_too_few_shards_is_found(tmp_path: Path) -> None:
    class Fewer:
        def ordered(self, function: Any, tasks: Iterator[bytes]) -> Iterator[bytes]:
            for _ in tasks:
                yield msgspec.msgpack.encode([])

    run = varied_run(tmp_path, long=2)
    with pytest.raises(CapdError, match=r"a worker checked 0 of \d+ shards"):
        verify_run(run, check_each=checks_on(Fewer(), run, 1 << 30, run))  # type: ignore[arg-type]


def test_a_changed_byte_ends_what_a_checkpoint_has(tmp_path: Path) -> None:
    with Checkpoint(tmp_path, PLAN) as log:
        log.add(0, b"a" * 50)
        log.add(1, b"b" * 50)
    path = tmp_path / "partials.log"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)

    with Checkpoint(tmp_path, PLAN) as log:
        assert log.tasks == {0}


def test_a_checkpoint_of_another_plan_or_another_process_is_refused(tmp_path: Path) -> None:
    with Checkpoint(tmp_path, PLAN) as log:
        log.add(0, b"mine")
        with pytest.raises(StoreBusy, match="another analysis"):
            Checkpoint(tmp_path, PLAN)
    with pytest.raises(ConfigError, match="checkpoint of another plan"):
        Checkpoint(tmp_path, PLAN[::-1])
    with Checkpoint(tmp_path, PLAN) as log:
        assert log.result(0) == b"mine"
    (tmp_path / "partials.log").write_text("somebody's notes")
    with pytest.raises(ConfigError, match="no checkpoint"):
        Checkpoint(tmp_path, PLAN)
    assert (tmp_path / "partials.log").read_text() == "somebody's notes"


def test_a_record_that_does_not_fit_a_worker_is_refused_with_what_it_needs() -> None:
    check_memory(1 << 20, "small", 80 << 20)
    check_memory(1 << 40, "without a limit", None)
    with pytest.raises(
        ConfigError, match=r"large, 100\.0 MiB, needs 664\.0 MiB.* give --memory-limit 664MiB"
    ):
        check_memory(100 << 20, "large", 600 << 20)


def test_a_scheduler_that_is_none_is_refused(tmp_path: Path) -> None:
    for word, message in (("spark", "use threads, processes"), (str(tmp_path / "no.json"), "no such file")):
        with pytest.raises(ConfigError, match=message):
            ClusterSettings(scheduler=word)
    ClusterSettings(scheduler="tcp://127.0.0.1:8786")
