"""What is kept is read by everything: zarr alone, the command line, the lab's numbers; and rules judge it once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import capd
from capd.analyze.format_choice import choices
from capd.lab.measuring import measured_bits
from tests.integration.recorder.told_ranks import NAN, TENSORS, Recording, assert_exact
from tests.kit.daemon import DaemonProcess, wait_for
from tests.kit.live.lab_worker import hurry
from tests.kit.store.cli import run_capd

K = 4
STEP, RANK = 5, 1
KEPT = range(STEP - K + 1, STEP + 2)
FORMATS = "mxfp8,nvfp4"
LAB = f'[lab]\nformats = ["{FORMATS.replace(",", chr(34) + ", " + chr(34))}"]\nsample = "1/1"\ncpu = "100%"'
# The elements of each record by the published columns, and the keeps, as a program without capd reads them.
PLAIN = """
import hashlib, json, pathlib, sys, zarr
found, run = [], pathlib.Path(sys.argv[1])
for place in sorted(run.glob("*/rank*/*/*/*/data")):
    attributes = zarr.open_group(place.parent, mode="r").attrs["capd"]
    key, records = attributes["key"], attributes["records"]
    if attributes["encoding"] == "errors":
        continue
    array = zarr.open_array(place, mode="r")
    assert array.shape[0] == records["count"]
    for number in range(records["count"]):
        iteration, shape = (
            one[number] if isinstance(one, list) and (name != "shape" or isinstance(one[0], list)) else one
            for name, one in (("iteration", records["iteration"]), ("shape", records["shape"]))
        )
        element = array[number][tuple(slice(extent) for extent in shape)]
        name = [iteration, key["module"], key["operation"], key["tensor_name"]]
        found.append([key["rank"], *name, hashlib.sha256(element.tobytes()).hexdigest()])
keeps = [json.loads(line) for at in run.glob(".capd/node=*/window/keeps.jsonl") for line in at.open()]
assert not [name for name in sys.modules if name.partition(".")[0] in ("capd", "capd_client")]
json.dump([found, keeps], sys.stdout)
"""


def recorded(recording: Recording, rules: str = NAN, head: str = "") -> DaemonProcess:
    """Record a NaN at one step, and let the ranks leave."""
    daemon = recording.serve(rules, head=head, iterations=K, post=1)
    recording.start_ranks(bad=(STEP, RANK))
    recording.train_to(STEP + K + 2)
    recording.an_alert()
    recording.leave()
    wait_for(lambda: not daemon.run_stats("run")["in_flight"], "the rest leaves")
    stats = daemon.run_stats("run")
    assert_exact(stats)
    keeps = stats["window"]["keeps"]
    assert stats["committed"] == 2 * TENSORS * sum(one["last"] - one["first"] + 1 for one in keeps), stats
    return daemon


def output(*words: str | Path) -> Any:
    done = run_capd(*words, "--json")
    assert done.code == 0, done.err
    return done.json


def test_zarr_alone_and_every_command_read_what_is_kept(recording: Recording) -> None:
    assert recorded(recording).stop() == 0
    run = recording.run
    recording.assert_kept(KEPT)

    plain = subprocess.run(
        [sys.executable, "-c", PLAIN, str(run)],
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found, [keep] = json.loads(plain.stdout)
    for rank in range(2):
        assert Counter(tuple(row[1:]) for row in found if row[0] == rank) == recording.captured(rank, KEPT)
    assert (keep["reason"], keep["iteration"], keep["first"], keep["last"]) == (
        "nan",
        STEP,
        KEPT[0],
        KEPT[-1],
    )

    trigger = {"reason": "nan", "iteration": STEP}
    for rank in range(2):
        [series] = capd.open(run).find(rank=rank, module="0", tensor_name="input")
        shown = output("show", run, f"{series.path}#-1")
        assert shown["metadata"]["trigger"] == trigger
        assert "trigger" in run_capd("show", run, f"{series.path}#-1").out
    listed = output("ls", run)
    assert sum(one["records"] for one in listed) == 2 * TENSORS * len(KEPT)
    compared = output("compare", run, "--formats", FORMATS, "--by", "iteration,tensor_name")
    assert {one["iteration"] for one in compared["groups"]} == set(KEPT)
    [alert] = output("alerts", run)
    assert (alert["rule"], alert["rank"], alert["iteration"]) == ("nan", RANK, STEP)
    assert run_capd("verify", run).code == 0


@pytest.mark.parametrize("action", ["warn", "keep"])
def test_rules_judge_records_while_they_are_held_and_only_then(recording: Recording, action: str) -> None:
    # Without a cooldown a second look at a record would be a second alert.
    rules = NAN.replace('"keep"', f'"{action}"').replace("cooldown = 1000", "cooldown = 0")
    assert recorded(recording, rules).stop() == 0
    assert [(one.rule, one.rank, one.iteration) for one in recording.alerts()] == [("nan", RANK, STEP)]
    assert recording.iterations(RANK) == (list(KEPT) if action == "keep" else [])


def test_the_labs_errors_are_there_for_what_is_kept_and_equal_those_of_compare(recording: Recording) -> None:
    daemon = recorded(recording, head=LAB)
    number = 2 * TENSORS * len(KEPT)

    def measured() -> dict[str, int] | None:
        hurry(daemon.process)
        lab = daemon.stats()["lab"]
        is_done = sum(lab["records"].values()) >= number and not lab["waiting"]
        return lab["records"] if is_done else None

    outcomes = wait_for(measured, "the lab has measured")
    assert {name: count for name, count in outcomes.items() if count} == {"measured": number}
    assert daemon.stop() == 0
    recording.assert_kept(KEPT)
    seen = 0
    for rank in range(2):
        for series in recording.series(rank):
            for record in series:
                errors, _ = measured_bits(record.numpy(), series.dtype, choices(FORMATS))
                assert record.errors == errors
                assert errors
                seen += 1
    assert seen == number
    stored = output("compare", recording.run, "--lab", "--by", "tensor_name,iteration")
    fresh = output("compare", recording.run, "--formats", FORMATS, "--by", "tensor_name,iteration")
    fields = ("tensor_name", "iteration", "errors")
    assert [[one[field] for field in fields] for one in stored["groups"]] == [
        [one[field] for field in fields] for one in fresh["groups"]
    ]
