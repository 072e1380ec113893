"""Errors of formats in copies, merges and repairs: they follow their records, and no number counts them as records."""

from __future__ import annotations

import shutil
from pathlib import Path

import capd
from capd.analyze.format_choice import choices
from capd.lab.measuring import measured_bits
from capd.store.read.store import Store
from tests.kit.store.cli import linear_key, run_capd, session_row
from tests.kit.store.measuring import MeasuredWriter, measured_run, values_of

FIRST, SECOND = b"a" * 16, b"b" * 16
KEY = linear_key(quant_type="fp32")


def capture(
    root: Path, client: bytes, steps: list[int], *, seed: int, begin: int = 0, measured: bool = True
) -> Path:
    """Let a client of rank 0 capture some steps into the run below `root`, which may be there."""
    writer = MeasuredWriter(root, node="node0")
    writer.client, writer.sequence = client, begin
    for step in steps:
        values = values_of(seed, step)
        sequence = writer.put(KEY, "float32", values, iteration=step)
        if measured:
            writer.measure([sequence], key=KEY, values=values, iteration=step)
    writer.flush()
    row = session_row(client=client, offered=begin + len(steps), committed=begin + len(steps))
    writer.pipeline.save_session("run", row).result(timeout=60)
    writer.close()
    return root / "run.zarr"


def attempts_with_errors(store: Store) -> list[tuple[int, int]]:
    """Attempt and iteration of each record with errors, which are those of its own elements."""
    found = []
    for series in store.find(attempt="all"):
        for record in series:
            if record.errors:
                bits = series.read(record.index)
                assert record.errors == measured_bits(bits, "float32", choices("fp8,mxfp8"))[0], record
                found.append((record.attempt, record.iteration))
    return sorted(found)


def test_errors_follow_records_of_shared_and_of_shifted_clients(tmp_path: Path) -> None:
    a = capture(tmp_path / "a", FIRST, [0, 1], seed=1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    # The second run has the first client, too, with one more record; and a client that did the steps again.
    capture(tmp_path / "b", FIRST, [5], seed=1, begin=2)
    b = capture(tmp_path / "b", SECOND, [0, 1], seed=2)
    new = tmp_path / "new.zarr"
    done = run_capd("merge", a, b, "-o", new, "--json")
    assert done.code == 0, done.err
    said = [
        {name: one[name] for name in ("records", "error_records", "repeated", "shift")}
        for one in done.json["sources"]
    ]
    assert said == [
        {"records": 2, "error_records": 2, "repeated": 0, "shift": 0},
        {"records": 3, "error_records": 3, "repeated": 2, "shift": 1},
    ]
    store = capd.open(new)
    assert attempts_with_errors(store) == [(0, 0), (0, 1), (0, 5), (1, 0), (1, 1)]
    assert (store.totals().records, store.totals().error_records) == (5, 5)
    assert run_capd("verify", new).code == 0


def test_a_repeated_capture_takes_the_errors_that_only_the_later_run_has(tmp_path: Path) -> None:
    a = capture(tmp_path / "a", FIRST, [0, 1], seed=1, measured=False)
    b = capture(tmp_path / "b", FIRST, [0, 1], seed=1)
    done = run_capd("merge", a, b, "-o", tmp_path / "new.zarr", "--json")
    assert done.code == 0, done.err
    assert [one["error_records"] for one in done.json["sources"]] == [0, 2]
    store = capd.open(tmp_path / "new.zarr")
    assert attempts_with_errors(store) == [(0, 0), (0, 1)]
    assert store.totals().records == 2


def test_no_number_of_a_copy_a_merge_or_a_repair_counts_errors_as_records(tmp_path: Path) -> None:
    run = measured_run(tmp_path / "a")
    whole, part = tmp_path / "whole.zarr", tmp_path / "part.zarr"
    for new, words in ((whole, []), (part, ["--iterations", "0-1"])):
        planned = run_capd("cp", run, new, *words, "--dry-run", "--json").json
        made = run_capd("cp", run, new, *words, "--json")
        assert made.code == 0, made.err
        records = 4 if words else 6
        for found in (planned, made.json):
            numbers = [found[name] for name in ("series", "records", "error_records", "raw_bytes")]
            assert numbers == [2, records, records, records * 8 * 64 * 4]
    shown = run_capd("cp", run, tmp_path / "shown.zarr", "--iterations", "0").out
    assert "2 records of 2 series, 4.0 KiB raw, errors of 2 records; copied" in shown

    other = capture(tmp_path / "b", SECOND, [0, 1, 2], seed=3)
    done = run_capd("merge", run, other, "-o", tmp_path / "both.zarr")
    assert done.code == 0, done.err
    assert "9 records, errors of 9 records; merged" in done.err

    saved = run_capd("verify", run, "--repair", "-o", tmp_path / "saved.zarr")
    assert "6 records, errors of 6 records saved in" in saved.out
    saved = run_capd("verify", run, "--repair", "-o", tmp_path / "again.zarr", "--json")
    [repaired] = saved.json["repaired"]
    assert (repaired["saved"], repaired["saved_errors"], repaired["lost"]) == (6, 6, [])


def test_lost_errors_are_no_lost_records(tmp_path: Path) -> None:
    run = measured_run(tmp_path, layers=1)
    [series] = [one for one in capd.open(run).everything() if one.kept == "errors"]
    [shard] = [file for file in (run / series.path / "data" / "c").rglob("*") if file.is_file()]
    payload = bytearray(shard.read_bytes())
    payload[len(payload) // 2] ^= 255
    shard.write_bytes(payload)
    done = run_capd("verify", run, "--repair", "-o", tmp_path / "saved.zarr", "--json")
    [repaired] = done.json["repaired"]
    assert repaired["saved"] == 3
    assert repaired["lost"]
    assert all(one["is_errors"] for one in repaired["lost"])
    assert repaired["saved_errors"] + len(repaired["lost"]) == 3
