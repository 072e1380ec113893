"""`capd alerts` and `capd rules check`: tables, JSON, severities, a run that is followed; and copies of a run."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import capd as reader
from capd.store.alerts.alert import Alert
from capd.store.alerts.file import alerts_path
from capd.store.objects.address import Address
from capd_client.protocol.key import Moment
from tests.kit import forking
from tests.kit.objects.uploaded import prefix, publish
from tests.kit.store.alerting import alert, give_alerts
from tests.kit.store.cli import StoreWriter, linear_key, run_capd, session_row

__all__ = ["prefix"]

ALERTS = [
    alert(1, severity="info"),
    alert(2, severity="critical", value="NaN", series="x\x1b[31m/y", series_paths=["x/y"]),
    alert(3),
]


def written(root: Path, *alerts: Alert) -> Path:
    """A run with four records and alerts."""
    writer = StoreWriter(root)
    for step in range(4):
        import numpy as np

        values = np.full((4, 4), step, "f4")
        writer.put("run", linear_key(), values, "float32", Moment(iteration=step, time_ns=step))
    writer.save_session("run", session_row())
    writer.close()
    run = root / "run.zarr"
    give_alerts(run, "node0", *alerts)
    return run


def test_stats_of_a_store_count_the_alerts_of_the_run(tmp_path: Path) -> None:
    run = written(tmp_path, *ALERTS)
    found = run_capd("stats", str(run), "--json").json
    assert (found["run_alerts"], found["last_alert"], found["alerts"]) == (3, "a text", None)
    assert "alerts      3 alerts; the last: a text" in run_capd("stats", str(run)).out
    alerts_path(run, "node0").unlink()
    assert "alerts  " not in run_capd("stats", str(run)).out
    alerts_path(run, "node0").symlink_to(run / "zarr.json")
    assert run_capd("stats", str(run), "--json").json["run_alerts"] is None
    assert "alerts      they cannot be read" in run_capd("stats", str(run)).out


def test_a_table_names_each_alert_and_keeps_the_terminal_safe(tmp_path: Path) -> None:
    run = written(tmp_path, *ALERTS)
    shown = run_capd("alerts", str(run))
    header, *lines = shown.out.splitlines()
    assert header.split()[:4] == ["when", "severity", "rule", "rank"]
    assert [line.split()[2] for line in lines] == ["info", "critical", "warning"]
    assert "NaN" in lines[1]
    assert "\x1b" not in shown.out
    assert run_capd("alerts", str(tmp_path), "--severity", "warning", "--json").json == [
        json.loads(json.dumps(one)) for one in _plain(ALERTS[1:])
    ]
    assert run_capd("alerts", str(run), "--severity", "bad").code == 2


def _plain(alerts: list[Alert]) -> list[dict[str, object]]:
    return [{name: getattr(one, name) for name in Alert.__struct_fields__} for one in alerts]


def test_a_run_without_alerts_says_so(tmp_path: Path) -> None:
    run = written(tmp_path)
    shown = run_capd("alerts", str(run))
    assert (shown.code, shown.out, shown.err) == (0, "", f"capd: no alerts in {run}\n")
    assert run_capd("alerts", str(run), "--json").json == []


def test_a_run_is_followed_until_ctrl_c(tmp_path: Path) -> None:
    run = written(tmp_path, ALERTS[0])
    command = [sys.executable, "-m", "capd", "alerts", str(run), "--follow", "--json"]
    process = forking.popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["iteration"] == 1
        give_alerts(run, "node0", ALERTS[2])
        assert json.loads(process.stdout.readline())["iteration"] == 3
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.communicate()


def test_a_run_that_is_removed_and_begun_again_is_followed_from_its_first_alert(tmp_path: Path) -> None:
    run = written(tmp_path, *ALERTS)
    command = [sys.executable, "-m", "capd", "alerts", str(run), "--follow", "--json"]
    process = forking.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert [json.loads(process.stdout.readline())["iteration"] for _ in ALERTS] == [1, 2, 3]
        shutil.rmtree(run)
        assert process.stderr.readline() == f"capd: {run} was removed; waiting for a new run of its name\n"
        # Its file becomes longer than the one that was read.
        written(tmp_path, *(alert(number) for number in range(10, 20)))
        found = [json.loads(process.stdout.readline())["iteration"] for _ in range(10)]
        assert found == [*range(10, 20)]
        # Another one takes its place between two looks.
        new = written(tmp_path / "other", alert(7))
        run.rename(tmp_path / "old")
        new.rename(run)
        assert json.loads(process.stdout.readline())["iteration"] == 7
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.communicate()


def test_copies_merges_and_repairs_keep_the_alerts(tmp_path: Path) -> None:
    run = written(tmp_path / "a", *ALERTS)
    for number, options in enumerate([(), ("--iterations", "2-3"), ("--attempt", "0")]):
        new = tmp_path / f"copy{number}.zarr"
        done = run_capd("cp", str(run), str(new), *options)
        assert done.code == 0, done.err
        assert reader.open(new).alerts == (ALERTS[1:] if "--iterations" in options else ALERTS)
        assert (run_capd("verify", str(new)).code, alerts_path(new, "node0").is_file()) == (0, True)

    other = written(tmp_path / "b", ALERTS[0], alert(9))
    done = run_capd("merge", str(run), str(other), "-o", str(tmp_path / "merged.zarr"))
    assert done.code == 0, done.err
    assert reader.open(tmp_path / "merged.zarr").alerts == [*ALERTS, alert(9)]

    path = alerts_path(run, "node0")
    payload = bytearray(path.read_bytes())
    payload[5] = 0
    path.write_bytes(payload)
    found = run_capd("verify", str(run), "--json")
    [damage] = found.json["damaged"]
    assert (found.code, damage["kind"], damage["offset"], damage["what"]) == (
        4,
        "alerts",
        0,
        "a line is no alert",
    )
    done = run_capd("verify", str(run), "--repair", "-o", str(tmp_path / "repaired.zarr"))
    assert reader.open(tmp_path / "repaired.zarr").alerts == ALERTS[1:], done.err
    assert run_capd("verify", str(tmp_path / "repaired.zarr")).code == 0


def test_a_torn_tail_is_no_damage(tmp_path: Path) -> None:
    run = written(tmp_path, *ALERTS)
    with alerts_path(run, "node0").open("ab") as file:
        file.write(b'{"time_ns":1')
    assert run_capd("verify", str(run)).code == 0
    assert reader.open(run).alerts == ALERTS


@pytest.mark.parametrize("harm", [None, b"", b"{}\n"])
def test_an_uploaded_run_has_its_alerts(tmp_path: Path, prefix: Address, harm: bytes | None) -> None:
    run = written(tmp_path, *ALERTS)
    place = publish(run, prefix)
    if harm is None:
        assert run_capd("alerts", str(place), "--json").json == run_capd("alerts", str(run), "--json").json
        assert reader.open(str(place)).alerts == ALERTS
        assert run_capd("verify", str(place)).code == 0
        assert run_capd("cp", str(place), str(tmp_path / "back.zarr")).code == 0
        assert (
            alerts_path(tmp_path / "back.zarr", "node0").read_bytes()
            == alerts_path(run, "node0").read_bytes()
        )
        return
    from capd.store.objects.bucket import Bucket

    bucket, key = Bucket(place), ".capd/node=node0/alerts-00000001.jsonl"
    bucket.put(key, harm) if harm else bucket.delete([key])
    found = run_capd("verify", str(place), "--json")
    assert (found.code, [one["file"] for one in found.json["damaged"]]) == (4, [key])
    assert run_capd("alerts", str(place)).code == 1
