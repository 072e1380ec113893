"""Files cut, lost, emptied, swapped or continued with garbage: the store opens and loses only what was touched."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.fault import check
from tests.fault.kit import figures, journals
from tests.fault.kit.damage import CLASSES, expected, frame_head, merge_wal, read_all, recover, small_store

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]

STEP = 512
RECORDS = 48


def commits(file: Path) -> list[tuple[int, list[int]]]:
    """(end of the COMMIT, numbers of the records it makes real) of a journal, in file order."""
    return [
        (offset + len(body), list(journals.rows_of(msgspec.msgpack.decode(body))))
        for kind, _, body, offset in journals.frames(file.read_bytes())
        if kind == journals.COMMIT
    ]


def sealed_records(run: Path, tensor_name: str) -> int:
    """Records of a series that stand in sealed shards, too."""
    [document] = run.glob(f"*/rank*/*/*/*.{tensor_name}/data/zarr.json")
    return int(json.loads(document.read_bytes())["shape"][0])


def reopened(
    root: Path, log: Path, scratch: Path, damage: Callable[[Path], None]
) -> dict[str, list[str] | int]:
    """The independent checker's report on a copy that was damaged and then recovered and sealed."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(root, scratch)
    damage(scratch / "run.zarr")
    recover(scratch)
    report = check.compare(scratch / "run.zarr", log)
    assert check.is_sound(report, "lost"), {name: value for name, value in report.items() if value}
    return report


@pytest.mark.parametrize("kind", ["partial", "log"])
def test_a_cut_journal_loses_what_stood_behind_the_cut(kind: str, tmp_path: Path) -> None:
    root, log = small_store(tmp_path)
    [file] = sorted((root / "run.zarr").glob(CLASSES[kind]))
    place, ends = file.relative_to(root / "run.zarr"), commits(file)
    sealed = sealed_records(root / "run.zarr", "medium" if kind == "partial" else "small")
    size, cuts, lost = file.stat().st_size, 0, 0
    for at in range(0, size, STEP):
        report = reopened(root, log, tmp_path / "cut", lambda run, at=at: os.truncate(run / place, at))
        least = sum(number >= sealed for end, numbers in ends if end > at for number in numbers)
        assert len(report["lost"]) == least, f"cut at {at}: {report['lost']}"
        cuts, lost = cuts + 1, lost + least
    figures.note(f"truncation, {kind}", cuts=cuts, lost=lost, lost_at_least=lost)


@pytest.mark.parametrize("kind", ["catalog", "wal"])
def test_a_cut_catalog_loses_nothing(kind: str, tmp_path: Path) -> None:
    root, log = small_store(tmp_path)
    if kind == "catalog":
        merge_wal(root / "run.zarr")
    [file] = (root / "run.zarr").glob(CLASSES[kind])
    place, size, cuts, lost = file.relative_to(root / "run.zarr"), file.stat().st_size, 0, 0
    for at in range(0, size, 2 * STEP):
        report = reopened(root, log, tmp_path / "cut", lambda run, at=at: os.truncate(run / place, at))
        assert report["lost"] == [], f"cut at {at}"
        cuts, lost = cuts + 1, lost + len(report["lost"])
    figures.note(f"truncation, {kind}", cuts=cuts, lost=lost)


def test_a_cut_shard_is_an_error_never_a_value(tmp_path: Path) -> None:
    """Plain readers need the index at the end; what capd still finds by the frames is right or an error."""
    root, log = small_store(tmp_path)
    wanted, cuts = expected(log), 0
    recover(root)
    shards = sorted((root / "run.zarr").glob(CLASSES["shard"]))
    for shard in shards:
        whole = shard.read_bytes()
        for at in range(0, len(whole), STEP):
            os.truncate(shard, at)
            reading = read_all(root / "run.zarr", wanted)
            assert not reading.wrong, f"{shard} cut at {at}"
            assert not reading.unknown, f"{shard} cut at {at}"
            recover(root)  # the start passes, whatever it finds
            shard.parent.mkdir(parents=True, exist_ok=True)
            shard.write_bytes(whole)
            cuts += 1
    figures.note("truncation, shard", cuts=cuts, silent_wrong=0)


def _swap(first: Path, second: Path) -> None:
    first.rename(first.with_suffix(".aside"))
    second.rename(first)
    first.with_suffix(".aside").rename(second)


@pytest.mark.parametrize("what", ["missing", "empty", "swapped", "random"])
def test_a_shard_that_is_not_there_or_not_itself_is_an_error_never_a_value(what: str, tmp_path: Path) -> None:
    root, log = small_store(tmp_path)
    wanted = expected(log)
    recover(root)
    first, second = sorted((root / "run.zarr").glob(CLASSES["shard"]))[:2]
    if what == "missing":
        first.unlink()
    elif what == "empty":
        os.truncate(first, 0)
    elif what == "random":
        first.write_bytes(random.Random(24).randbytes(first.stat().st_size))
    else:
        _swap(first, second)
    reading = read_all(root / "run.zarr", wanted)
    assert reading.outcome(RECORDS) in ("raised", "missing")
    if what != "swapped":
        assert reading.same, "the other series are whole"
    recover(root)
    assert read_all(root / "run.zarr", wanted).outcome(RECORDS) in ("raised", "missing")


def _garbage(journal: Path, run: Path) -> bytes:
    return random.Random(25).randbytes(3000)


def _own_tail_again(journal: Path, run: Path) -> bytes:
    return journal.read_bytes()[-700:]


def _own_last_records_again(journal: Path, run: Path) -> bytes:
    ends = [end for end, _ in commits(journal)]
    return journal.read_bytes()[ends[-3] : ends[-1]]


def _zeros(journal: Path, run: Path) -> bytes:
    return bytes(4096)


def _another_file(journal: Path, run: Path) -> bytes:
    others = [*run.glob(CLASSES["log"]), *run.glob(CLASSES["partial"])]
    return next(other for other in others if other != journal).read_bytes()


@pytest.mark.parametrize("tail", [_garbage, _own_tail_again, _own_last_records_again, _zeros, _another_file])
@pytest.mark.parametrize("kind", ["partial", "log"])
def test_what_is_appended_to_a_journal_is_ignored(
    kind: str, tail: Callable[[Path, Path], bytes], tmp_path: Path
) -> None:
    root, log = small_store(tmp_path)

    def append(run: Path) -> None:
        [journal] = run.glob(CLASSES[kind])
        extra = tail(journal, run)
        with journal.open("ab") as opened:
            opened.write(extra)

    assert reopened(root, log, tmp_path / "tailed", append)["lost"] == []


def test_a_journal_of_another_run_is_not_taken_for_this_one(tmp_path: Path) -> None:
    root, log = small_store(tmp_path)
    (tmp_path / "other").mkdir()
    other, _ = small_store(tmp_path / "other")
    (other / "run.zarr").rename(other / "second.zarr")

    def bring(run: Path) -> None:
        [foreign] = (other / "second.zarr").glob(CLASSES["log"])
        payload = foreign.read_bytes()
        _, _, header, at = next(journals.frames(payload))
        fields = msgspec.msgpack.decode(header)
        fields[1] = "other"
        changed = msgspec.msgpack.encode(fields)
        payload = frame_head(journals.HEADER, changed) + changed + payload[at + len(header) :]
        (run / ".capd/node=n/spool/small-00000777.log").write_bytes(payload)

    assert reopened(root, log, tmp_path / "mixed", bring)["lost"] == []
