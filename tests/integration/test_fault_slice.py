"""A slice of the fault tier (`tests/fault`) that runs in seconds, and tests of the checker that the tier believes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.fault import check
from tests.fault.chaos.chaos import Chaos
from tests.fault.chaos.chaos_judge import judge
from tests.fault.kit import journals
from tests.fault.kit.damage import (
    CLASSES,
    expected,
    flip,
    frame_head,
    merge_wal,
    read_all,
    recover,
    small_store,
)
from tests.fault.kit.ends import end_ranks
from tests.fault.kit.rounds import failpoint_spec, kill_rounds, prepare_for
from tests.fault.kit.site import Site, exercise
from tests.kit.processes import Daemon
from tests.kit.store.writing import Writer, key
from tests.kit.tiers import rows

RECORDS = 48
FLIPS = 12
ENDS = 8
CHAOS_S = 15.0


@pytest.fixture
def site(tmp_path: Path, runtime_dir: Path) -> Iterator[Site]:
    site = Site(tmp_path, runtime_dir)
    yield site
    site.close()


# The checker


def test_the_checker_knows_nothing_of_capd() -> None:
    code = "import sys, tests.fault.check; sys.exit(any(m.split('.')[0].startswith('capd') for m in sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode
        == 0
    )


def test_the_checker_reads_every_state_of_a_record(tmp_path: Path) -> None:
    root, log = small_store(tmp_path)
    report = check.compare(root / "run.zarr", log)
    assert check.is_sound(report), report
    assert (report["found"], report["published"], report["unpublished"]) == (48, 32, 16)
    command = [sys.executable, "-m", "tests.fault.check", str(root / "run.zarr"), str(log)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    assert json.loads(done.stdout) == report


def _in_log(path: Path, **line: object) -> None:
    with path.open("a") as log:
        log.write(json.dumps(line) + "\n")


def _lose_an_acked_one(run: Path, log: Path) -> None:
    _in_log(log, op="offer", rank=0, id=99, name="small", hash="")
    _in_log(log, op="ack", rank=0, id=99)


def _refuse_a_kept_one(run: Path, log: Path) -> None:
    _in_log(log, op="refuse", rank=0, id=5)


def _expect_other_bits(run: Path, log: Path) -> None:
    _in_log(log, op="offer", rank=0, id=0, name="small", hash="0" * 32)


def _forget_an_offer(run: Path, log: Path) -> None:
    log.write_text("\n".join(line for line in log.read_text().splitlines() if json.loads(line)["id"] != 5))


def _copy_a_log_line(run: Path, log: Path) -> None:
    """The same record again, behind its COMMIT, as record 1000 of its series."""
    [journal] = run.glob(CLASSES["log"])
    payload = journal.read_bytes()
    *_, (start, body) = (
        (at, body) for kind, _, body, at in journals.frames(payload) if kind == journals.RECORD
    )
    commit = next(
        body for kind, _, body, at in journals.frames(payload) if kind == journals.COMMIT and at > start
    )
    document = journals.msgspec.msgpack.decode(commit)
    document[0], document[1][0][0], document[1][0][1] = 1000, b"another client's", 7
    again = journals.msgspec.msgpack.encode(document)
    with journal.open("ab") as opened:
        opened.write(frame_head(journals.RECORD, body) + body + frame_head(journals.COMMIT, again) + again)


def _publish_too_much(run: Path, log: Path) -> None:
    [path] = run.glob("*/rank*/*/*/*small/data/zarr.json")
    document = json.loads(path.read_bytes())
    document["shape"][0] += 40
    path.write_text(json.dumps(document))


def _flip_in_a_shard(run: Path, log: Path) -> None:
    shard = sorted(run.glob(CLASSES["shard"]))[0]
    chunk = next(at for kind, _, _, at in journals.frames(shard.read_bytes()) if kind == journals.CHUNK)
    flip(shard, 8 * (chunk + 40))


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (_lose_an_acked_one, "lost"),
        (_refuse_a_kept_one, "refused"),
        (_expect_other_bits, "wrong"),
        (_forget_an_offer, "unknown"),
        (_copy_a_log_line, "duplicates"),
        (_publish_too_much, "contradictions"),
        (_flip_in_a_shard, "unreadable"),
    ],
)
def test_the_checker_finds(damage, finding: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    root, log = small_store(tmp_path)
    damage(root / "run.zarr", log)
    report = check.compare(root / "run.zarr", log)
    assert report[finding], report


# The slice


@pytest.mark.parametrize("durability", rows(["buffered", "durable"], ["durable"]))
def test_kills_at_random_moments_lose_nothing(durability: str, site: Site) -> None:
    site.options = ("--durability", durability)
    kill_rounds(site, [site.rank(0), site.rank(1)], 3, random.Random(durability))
    site.report()
    site.finish()


def test_ends_of_ranks_lose_nothing_that_was_captured(daemon: Daemon, tmp_path: Path) -> None:
    end_ranks(daemon, tmp_path, random.Random("slice of ends"), ENDS)


@pytest.mark.parametrize(
    "name", rows(["seal.after_rename", "log.after_write", "recover.after_logs"], ["log.after_write"])
)
def test_a_kill_at_a_step_of_the_protocol_loses_nothing(name: str, site: Site) -> None:
    prepare_for(site, name)
    rank = site.rank(0)
    if site.start(CAPD_FAILPOINTS=failpoint_spec(name, "kill")):
        exercise(site, rank, captures=8)
    assert site.ended() == -signal.SIGKILL, f"{name} was not reached\n{site.says()}"
    site.report()
    site.finish()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_and_daemon_under_random_faults_keep_every_promise(site: Site, tmp_path: Path) -> None:
    chaos = Chaos(site, tmp_path, "slice")
    try:
        chaos.run(CHAOS_S)
        chaos.end()
    finally:
        chaos.close()
    judge(chaos, tmp_path / "all.jsonl")


@pytest.mark.parametrize("kind", CLASSES)
def test_a_flipped_bit_is_an_error_or_nothing(kind: str, tmp_path: Path) -> None:
    root, log = small_store(tmp_path)
    run, wanted = root / "run.zarr", expected(log)
    if kind == "catalog":
        merge_wal(run)
    generator = random.Random(f"slice {kind}")
    files = sorted(run.glob(CLASSES[kind]))
    for _ in range(FLIPS):
        file = generator.choice(files)
        bit = generator.randrange(8 * file.stat().st_size)
        flip(file, bit)
        reading = read_all(run, wanted)
        assert not reading.wrong, f"bit {bit} of {file}"
        assert not reading.unknown, f"bit {bit} of {file}"
        flip(file, bit)
    assert read_all(run, wanted).outcome(RECORDS) == "identical"


@pytest.mark.parametrize("kind", ["partial", "log", "catalog"])
def test_a_cut_file_does_not_keep_the_store_from_opening(kind: str, tmp_path: Path) -> None:
    root, log = small_store(tmp_path)
    [file] = (root / "run.zarr").glob(CLASSES[kind])
    os.truncate(file, file.stat().st_size * 2 // 3)
    recover(root)
    report = check.compare(root / "run.zarr", log)
    assert check.is_sound(report, "lost"), report
    assert len(report["lost"]) < 12


def test_a_small_record_of_noise_takes_little_room(tmp_path: Path) -> None:
    """Its chunk has room for 256 of its kind; the empty rest must not be stored, whatever codec suits the noise."""
    writer = Writer(tmp_path, node="n")
    writer.put(key("noise"), "float32", np.frombuffer(random.Random(12).randbytes(4096), dtype="f4"))
    writer.flush()
    writer.close()
    [shard] = writer.run.glob("*/rank*/*/*/*/data/c/*/*")
    assert shard.stat().st_size < 64 << 10
