"""What one sample of the feed has: alerts of several runs, and records of the moment of the frame."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from capd.store.disk.layout import node_directory
from capd.top.feed import TopFeed
from capd.top.once import one_frame
from capd_client.protocol.key import Moment
from tests.kit.live.answers import Answers, run, session
from tests.kit.store.alerting import alert, give_alerts
from tests.kit.store.cli import StoreWriter, linear_key


@pytest.fixture
def daemon(runtime_dir: Path) -> Iterator[Answers]:
    answers = Answers(runtime_dir / "s.sock")
    answers.start()
    yield answers
    answers.stop()


def test_alerts_of_live_runs_are_events_and_those_of_the_shown_run_are_counted(
    daemon: Answers, tmp_path: Path
) -> None:
    places = {name: tmp_path / f"{name}.zarr" for name in ("ended", "one", "two")}
    for number, place in enumerate(places.values()):
        node_directory(place, "n").mkdir(parents=True)
        give_alerts(place, "n", alert(number, severity="critical", text="x" * 8000))
    left = session(0, state="ended", connected=False)
    states = {"ended": left, "one": session(0), "two": session(0)}
    daemon.runs = [run(name, [states[name]], path=str(places[name])) for name in places]
    feed = TopFeed(daemon.path, None, 1.0)
    first = feed.take()
    assert [(event.run, event.severity, len(event.text)) for event in first.events if event.is_alert] == [
        ("one", "critical", 400), ("two", "critical", 400),
    ]  # fmt: skip
    assert (first.run_id, dict(first.alerts)) == ("two", {"critical": 1})

    # Alerts stay when the ranks of a run have left, and further ones come.
    daemon.runs[1] = run("one", [left], path=str(places["one"]))
    give_alerts(places["one"], "n", alert(5, severity="info"))
    feed.run_id = "ended"
    then = feed.take()
    assert [(event.run, event.time_ns) for event in then.events if event.is_alert] == [
        ("ended", 0), ("one", 1), ("two", 2), ("one", 5),
    ]  # fmt: skip
    assert (then.run_id, dict(then.alerts)) == ("ended", {"critical": 1})
    # A run that the daemon has no more takes its alerts with it.
    del daemon.runs[1]
    assert {event.run for event in feed.take().events if event.is_alert} == {"ended", "two"}
    feed.close()


def test_one_frame_has_the_records_that_came_between_its_samples(daemon: Answers, tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, "n")
    writer.put("run", linear_key(), np.zeros(3, "f4"), "float32", Moment(iteration=1, time_ns=1))
    writer.close()
    daemon.runs = [run("run", [session(0)], path=os.fspath(tmp_path / "run.zarr"))]
    feed = TopFeed(daemon.path, None, 1.0)
    assert feed.take(with_records=False).records == []
    assert [record.moment.iteration for record in feed.take().records] == [1]
    feed.close()
    assert any("forward.input" in line for line in one_frame(daemon.path, None, 0.0, 100))
