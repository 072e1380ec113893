"""A run with keeps, and with the spool of a killed recorder, under the commands: stats, verify, cp, merge, rm, du."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import capd as reader
from capd.report.page.ledger import ledger_data
from capd.store.keeps.file import keeps_path
from capd.store.keeps.held_files import memory_directory
from capd.store.keeps.keep import Keep
from capd.store.objects.address import Address
from capd.store.objects.bucket import Bucket
from capd_client.protocol.key import Moment
from tests.kit.objects.uploaded import prefix, publish
from tests.kit.store.cli import StoreWriter, linear_key, run_capd, session_row
from tests.kit.store.keeping import give_keeps, keep, leave_held

__all__ = ["prefix"]

KEEPS = [keep(1, reason="loss \x1b[31mspike"), keep(3, attempt=0)]
ADVICE = "start the daemon with [window] again"


def written(root: Path, *keeps: Keep) -> Path:
    """A run with four records and keeps, of which a recorder let three records go."""
    writer = StoreWriter(root)
    for step in range(4):
        values = np.full((4, 4), step, "f4")
        writer.put("run", linear_key(), values, "float32", Moment(iteration=step, time_ns=step))
    writer.save_session("run", session_row(offered=7, committed=4, dropped={"expired": 3}))
    writer.close()
    give_keeps(root / "run.zarr", "node0", *keeps)
    return root / "run.zarr"


def test_stats_of_an_ended_run_list_the_keeps_and_lose_nothing(tmp_path: Path) -> None:
    run = written(tmp_path, *KEEPS)
    shown = run_capd("stats", str(run))

    assert shown.code == 0
    assert "was dropped" not in shown.out + shown.err
    assert "\x1b" not in shown.out
    lines = [
        line for line in shown.out.splitlines() if line.startswith(("window", "kept", "left out", "dropped"))
    ]
    assert lines == [
        "dropped     0",
        "left out    3 (3 expired)",
        "window      nothing held; 3 records let go; 2 keeps",
        "kept        iterations 0 to 2: loss \ufffd[31mspike at iteration 1 (node node0)",
        "kept        iterations 2 to 4: nan at iteration 3 (node node0)",
    ]
    window = run_capd("stats", str(run), "--json").json["window"]
    assert (window["iterations"], window["first"], window["held_records"], window["expired"]) == (
        0,
        None,
        None,
        3,
    )
    assert [(one["reason"], one["iteration"]) for one in window["keeps"]] == [
        (one.reason, one.iteration) for one in KEEPS
    ]
    assert reader.open(run).keeps == KEEPS


def test_stats_list_the_last_keeps_of_many(tmp_path: Path) -> None:
    run = written(tmp_path, *(keep(number) for number in range(20)))
    shown = run_capd("stats", str(run)).out.splitlines()

    assert "kept        4 earlier ones are not listed" in shown
    window = run_capd("stats", str(run), "--json").json["window"]
    assert (window["keeps_total"], [one["iteration"] for one in window["keeps"]]) == (20, list(range(4, 20)))


def test_a_run_without_a_recorder_has_no_window(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    writer.put("run", linear_key(), np.zeros((4, 4), "f4"), "float32", Moment(iteration=0))
    writer.close()

    assert "window" not in run_capd("stats", str(tmp_path / "run.zarr")).out
    assert run_capd("stats", str(tmp_path / "run.zarr"), "--json").json["window"] is None


def test_the_spool_of_a_killed_daemon_is_no_damage_and_verify_says_what_to_do(tmp_path: Path) -> None:
    run = written(tmp_path, *KEEPS)
    leave_held(run, "node0", 7, 5000)
    leave_held(run, "node0", 9, 7000, in_memory=True)
    (run / ".capd" / "keeps").mkdir()
    (run / ".capd" / "keeps" / "0-3-node0.json").write_text("{")
    found = run_capd("verify", str(run))

    assert found.code == 0
    assert (
        f"12,000 B of iterations 7 to 9 are held by a flight recorder whose daemon does not run; {ADVICE}"
        in found.err
    )
    assert "is not part of the run" not in found.err
    assert run_capd("runs", str(tmp_path), "--json").json[0]["state"] == "unsealed"
    window = run_capd("stats", str(run), "--json").json["window"]
    assert [window[name] for name in ("iterations", "first", "last", "memory_bytes", "disk_bytes")] == [
        2,
        7,
        9,
        7000,
        5000,
    ]
    assert "iterations 7 to 9 held, 6.8 KiB in memory and 4.9 KiB on disk" in run_capd("stats", str(run)).out


def test_du_counts_the_spool(tmp_path: Path) -> None:
    run = written(tmp_path)
    before = run_capd("du", str(run), "--json").json["groups"][0]
    leave_held(run, "node0", 7, 5000)
    after = run_capd("du", str(run), "--json").json["groups"][0]

    assert after["stored_bytes"] == before["stored_bytes"] + 5000
    assert after["reclaimable_bytes"] == before["reclaimable_bytes"]
    assert run_capd("gc", str(tmp_path), "--yes").code == 0
    assert len(list(run.rglob("*.held"))) == 1


def test_rm_removes_the_spool_from_disk_and_memory(tmp_path: Path) -> None:
    run = written(tmp_path, *KEEPS)
    leave_held(run, "node0", 7, 5000)
    leave_held(run, "node0", 8, 5000, in_memory=True)
    done = run_capd("rm", str(run), "--yes")

    assert done.code == 0, done.err
    assert not list(memory_directory(tmp_path, "node0").rglob("*"))
    assert len(list((tmp_path / ".capd" / "trash").rglob("*.held"))) == 1
    assert run_capd("gc", str(tmp_path), "--all", "--yes").code == 0
    assert not list(tmp_path.rglob("*.held"))


def test_copies_merges_and_repairs_have_the_keeps_and_not_the_spool(tmp_path: Path) -> None:
    run = written(tmp_path / "a", *KEEPS)
    leave_held(run, "node0", 7, 5000)
    (run / ".capd" / "keeps").mkdir()
    (run / ".capd" / "keeps" / "0-3-node0.json").write_text("{}")
    for number, options in enumerate([(), ("--iterations", "3"), ("--attempt", "0")]):
        new = tmp_path / f"copy{number}.zarr"
        done = run_capd("cp", str(run), str(new), *options)
        assert done.code == 0, done.err
        assert reader.open(new).keeps == (KEEPS[1:] if "--iterations" in options else KEEPS)
        assert run_capd("verify", str(new)).err == ""
        assert {path.name for path in new.rglob("window/*")} == {"keeps.jsonl"}
        assert not (new / ".capd" / "keeps").exists()

    other = written(tmp_path / "b", KEEPS[0], keep(9))
    done = run_capd("merge", str(run), str(other), "-o", str(tmp_path / "merged.zarr"))
    assert done.code == 0, done.err
    assert reader.open(tmp_path / "merged.zarr").keeps == [*KEEPS, keep(9)]
    assert not list((tmp_path / "merged.zarr").rglob("*.held"))

    payload = bytearray(keeps_path(run, "node0").read_bytes())
    payload[5] = 0
    keeps_path(run, "node0").write_bytes(payload)
    found = run_capd("verify", str(run), "--json")
    [damage] = found.json["damaged"]
    assert (found.code, damage["kind"], damage["offset"], damage["what"]) == (
        4,
        "keeps",
        0,
        "a line is no keep",
    )
    done = run_capd("verify", str(run), "--repair", "-o", str(tmp_path / "repaired.zarr"))
    assert reader.open(tmp_path / "repaired.zarr").keeps == KEEPS[1:], done.err
    assert run_capd("verify", str(tmp_path / "repaired.zarr")).code == 0


def test_attempts_that_a_merge_counts_on_are_those_of_the_keeps(tmp_path: Path) -> None:
    first = written(tmp_path / "a", keep(1))
    writer = StoreWriter(tmp_path / "b")
    writer.client = b"\7" * 16
    writer.put("run", linear_key(), np.ones((4, 4), "f4"), "float32", Moment(iteration=0))
    writer.save_session("run", session_row(client=writer.client))
    writer.close()
    give_keeps(tmp_path / "b" / "run.zarr", "node0", keep(1))
    done = run_capd("merge", str(first), str(tmp_path / "b" / "run.zarr"), "-o", str(tmp_path / "m.zarr"))

    assert done.code == 0, done.err
    assert reader.open(tmp_path / "m.zarr").keeps == [keep(1), keep(1, attempt=1)]


@pytest.mark.parametrize("harm", [None, b"", b"{}\n"])
def test_an_uploaded_run_has_its_keeps_and_nothing_of_the_spool(
    tmp_path: Path, prefix: Address, harm: bytes | None
) -> None:
    run = written(tmp_path, *KEEPS)
    leave_held(run, "node0", 7, 5000)
    place = publish(run, prefix)
    bucket, key = Bucket(place), ".capd/node=node0/keeps-00000001.jsonl"
    if harm is None:
        assert reader.open(str(place)).keeps == KEEPS
        assert run_capd("stats", str(place), "--json").json["window"]["keeps_total"] == 2
        assert run_capd("verify", str(place)).code == 0
        assert run_capd("cp", str(place), str(tmp_path / "back.zarr")).code == 0
        assert (
            keeps_path(tmp_path / "back.zarr", "node0").read_bytes() == keeps_path(run, "node0").read_bytes()
        )
        assert not [head.key for head in bucket.listing() if "held" in head.key or "window" in head.key]
        # Keeps that come later go up alone.
        give_keeps(run, "node0", keep(9))
        assert reader.open(str(publish(run, prefix))).keeps == [*KEEPS, keep(9)]
        return
    bucket.put(key, harm) if harm else bucket.delete([key])
    found = run_capd("verify", str(place), "--json")
    assert (found.code, [one["file"] for one in found.json["damaged"]]) == (4, [key])
    assert run_capd("stats", str(place)).code == 1


def test_reading_commands_take_let_go_records_for_no_loss(tmp_path: Path) -> None:
    written(tmp_path, *KEEPS)
    run = str(tmp_path / "run.zarr")
    drops = run_capd("stats", run, "--drops", "--json").json

    assert [(one["reason"], one["count"]) for one in drops] == [("expired", 3)]
    for command in (("ls", run), ("runs", str(tmp_path)), ("verify", run)):
        found = run_capd(*command)
        assert found.code == 0, found.err
        for word in ("expired", "dropped", "incomplete", "lost"):
            assert word not in found.out + found.err, (command, word)
    ledger = ledger_data(run)
    assert (ledger["dropped"], ledger["left_out"]) == ({}, {"expired": 3})
