"""The file of alerts: torn tails, hostile lines, a removed run, a full file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from capd.errors import StoreError
from capd.store.alerts import file as alert_file
from capd.store.alerts.alert import MAX_LINE_NBYTES, alert_line, alert_of
from capd.store.alerts.file import (
    AlertFollower,
    AlertWriter,
    alerts_of_run,
    alerts_path,
    parse_alerts,
    read_alerts,
    whole_lines,
)
from tests.kit.store.alerting import alert


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run.zarr" / ".capd" / "node=n").mkdir(parents=True)
    return tmp_path / "run.zarr"


def test_alerts_are_read_as_they_were_written(run: Path) -> None:
    writer = AlertWriter(run, "n", durable=True)
    assert writer.begin() == []
    written = [alert(1, value="NaN"), alert(2, series="ü/\n", value="-Infinity"), alert(3, count=10**6)]
    writer.append(written[:2])
    writer.append(written[2:])
    assert read_alerts(alerts_path(run, "n")).items == written
    assert AlertWriter(run, "n", durable=False).begin() == written
    assert oct(alerts_path(run, "n").stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize("cut", [1, 20, 150])
def test_a_torn_tail_is_left_out_by_readers_and_cut_off_by_the_next_daemon(run: Path, cut: int) -> None:
    AlertWriter(run, "n", durable=False).append([alert(1), alert(2)])
    path = alerts_path(run, "n")
    os.truncate(path, path.stat().st_size - cut)
    found = read_alerts(path)
    assert (found.items, found.damaged) == ([alert(1)], ())
    assert found.torn_nbytes == len(alert_line(alert(2))) - cut
    assert whole_lines(path) == alert_line(alert(1))
    writer = AlertWriter(run, "n", durable=False)
    assert writer.begin() == [alert(1)]
    writer.append([alert(3)])
    assert read_alerts(path) == parse_alerts(alert_line(alert(1)) + alert_line(alert(3)))


HOSTILE = [
    b"", b"{}", b"null", b"[]", b"\0" * 40, b"{" * 10_000, b"[" * 60_000, b"x" * MAX_LINE_NBYTES,
    alert_line(alert(rank=2**63 - 1)).replace(b"9223372036854775807", b"9" * 400)[:-1],
    alert_line(alert()).replace(b'"rank":0', b'"rank":-1')[:-1],
    alert_line(alert()).replace(b'"warning"', b'"bad"')[:-1],
    alert_line(alert()).replace(b'"value":1.0', b'"value":"x"')[:-1],
    alert_line(alert()).replace(b'["a/b"]', b'["' + b'","'.join([b"x"] * 21) + b'"]')[:-1],
    alert_line(alert()).replace(b"a text", b"\xff")[:-1],
]  # fmt: skip


@pytest.mark.parametrize("line", HOSTILE, ids=lambda line: repr(line[:40]))
def test_a_damaged_line_is_told_and_the_others_are_read(line: bytes) -> None:
    assert alert_of(line) is None
    found = parse_alerts(alert_line(alert(1)) + line + b"\n" + alert_line(alert(2)))
    assert found.items == [alert(1), alert(2)]
    assert found.damaged == (len(alert_line(alert(1))),)


def test_a_line_with_long_paths_keeps_its_count(run: Path) -> None:
    long = alert(count=20, series="x" * 8000, series_paths=["ü" * 4000] * 20)
    line = alert_line(long)
    assert len(line) <= MAX_LINE_NBYTES
    found = alert_of(line[:-1])
    assert found is not None
    assert (found.count, found.series) == (20, long.series)
    assert found.series_paths == long.series_paths[: len(found.series_paths)]
    assert found.series_paths


def test_a_run_that_was_begun_again_gets_a_file_of_its_own(run: Path) -> None:
    writer = AlertWriter(run, "n", durable=False)
    writer.append([alert(1), alert(2)])
    alerts_path(run, "n").unlink()
    writer.append([alert(3)])
    assert read_alerts(alerts_path(run, "n")) == parse_alerts(alert_line(alert(3)))


def test_a_full_file_takes_no_more(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = AlertWriter(run, "n", durable=False)
    writer.append([alert(1)])
    monkeypatch.setattr(alert_file, "MAX_ALERTS_NBYTES", 400)
    with pytest.raises(StoreError, match="further alerts are not stored"):
        writer.append([alert(2)])
    assert read_alerts(alerts_path(run, "n")).items == [alert(1)]


def test_what_is_no_regular_file_is_refused(run: Path) -> None:
    path = alerts_path(run, "n")
    os.mkfifo(path)
    with pytest.raises(StoreError, match="not a regular file"):
        read_alerts(path)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic"):
        read_alerts(path)


def test_nodes_are_read_together_and_followed(run: Path) -> None:
    (run / ".capd" / "node=m").mkdir()
    follower = AlertFollower(run)
    assert follower.new() == []
    AlertWriter(run, "n", durable=False).append([alert(5)])
    AlertWriter(run, "m", durable=False).append([alert(3, node="m")])
    assert [one.time_ns for one in follower.new()] == [3, 5]
    with alerts_path(run, "n").open("ab") as file:
        file.write(alert_line(alert(7))[:30])
    assert follower.new() == []
    AlertWriter(run, "n", durable=False).append([alert(8)])
    assert [one.time_ns for one in follower.new()] == [8]
    assert [one.time_ns for one in alerts_of_run(run)] == [3, 5, 8]
