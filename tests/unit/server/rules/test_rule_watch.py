"""The thread of the rules: what does not fit is counted, a file that cannot be written too, and a new run is new."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from capd.analyze.error_sums import Errors, ErrorSums
from capd.errors import ConfigError
from capd.lab.stored_errors import MeasuredRow, StoredErrors, pack_row
from capd.rules.schema import parse_triggers
from capd.server.rules.actions import AlertActions
from capd.server.rules.commands import MAX_WAITING as MAX_COMMANDS
from capd.server.rules.commands import AlertCommands
from capd.server.rules.rank_looks import RankLook, RankLooks
from capd.server.rules.record_feed import MAX_WAITING, MAX_WAITING_ERRORS, CommittedRecord, RecordFeed
from capd.server.rules.watch import RuleWatch
from capd.store.alerts.file import alerts_of_run, alerts_path
from capd.store.format.frames import RecordRow, SeriesHeader
from capd.store.format.geometry import Geometry
from capd.store.format.statistics import summarise
from capd_client.protocol.control import Control, ControlReply
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.selection import Selection
from tests.kit.daemon import wait_for

HEADER = SeriesHeader(
    "a/b",
    Key(quant_type="bf16", rank=0, tensor_name="input"),
    "float32",
    "none",
    Geometry((4,), (4,), 4, 4, 4),
)
NAN = {"name": "nan", "metric": "nan", "above": 0}


def row(iteration: int, value: float = float("nan")) -> RecordRow:
    stats = summarise(np.array([value], "f4"), "float32")
    return RecordRow(b"c" * 16, iteration, (1,), 4, Moment(iteration=iteration), stats=stats)


def measured(iteration: int, *, fine: bool = False) -> MeasuredRow:
    """The row of a record whose SQNR in mxfp8 is 10 or 30 dB."""
    errors = Errors(records=1, count=4, sums=ErrorSums(x2=1000, d2=1 if fine else 100))
    data = pack_row(StoredErrors(b"c" * 16, iteration, {"mxfp8": errors}, []))
    return MeasuredRow(HEADER.path, HEADER.key, Moment(iteration=iteration), data)


class Kept:
    """A flight recorder that notes what it is asked."""

    def __init__(self, answer: str = "") -> None:
        self.asked: list[tuple[str, int | None, str, int | None]] = []
        self._answer = answer

    def keep(self, run_id: str, iteration: int | None, reason: str, *, post: int | None = None) -> str:
        self.asked.append((run_id, iteration, reason, post))
        return self._answer


class Ordered:
    """The ranks of a run, which are told what to capture."""

    def __init__(self, *answers: ControlReply) -> None:
        self.orders: list[Control] = []
        self._answers = iter(answers)

    def order(self, order: Control) -> ControlReply:
        self.orders.append(order)
        return next(self._answers)


class NoLooks:
    """Looks at no rank."""

    def look(self) -> list[object]:
        return []


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "run.zarr" / ".capd" / "node=n").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def watch(root: Path) -> Iterator[RuleWatch]:
    found = RuleWatch(parse_triggers([NAN]), root, "n", durable=True, statistics=True)
    found.start()
    yield found
    found.stop(30.0)


def test_a_full_queue_leaves_records_out_and_counts_them() -> None:
    feed: RecordFeed[CommittedRecord] = RecordFeed()
    batch = [(HEADER, row(0))] * 1000
    for _ in range(20):
        feed.offer("run", batch)
    held = MAX_WAITING // 1000
    assert (feed.offered, feed.left_out) == (20_000, 20_000 - 1000 * held)
    assert feed.take() == ("run", batch)
    feed.offer("run", batch)
    assert feed.left_out == 20_000 - 1000 * held
    for _ in range(held):
        assert feed.take() is not None
    assert feed.take() is None


def test_records_that_wait_at_the_end_are_judged(watch: RuleWatch, root: Path) -> None:
    for iteration in range(0, 1000, 100):
        watch.feed.offer("run", [(HEADER, row(iteration))])
    watch.stop(30.0)
    assert [one.iteration for one in alerts_of_run(root / "run.zarr")] == list(range(0, 1000, 100))
    assert watch.stats().alerts == 10


def test_a_file_that_cannot_be_written_costs_no_alert_in_the_log(
    watch: RuleWatch, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = alerts_path(root / "run.zarr", "n")
    path.mkdir()
    watch.feed.offer("run", [(HEADER, row(0)), (HEADER, row(200))])
    wait_for(lambda: watch.stats().alerts == 2, "two alerts")
    assert watch.stats().not_stored == 2
    said = [one.message for one in caplog.records]
    assert sum("are only in this log" in one for one in said) == 1
    assert sum(one.startswith("[trigger] run run: nan") for one in said) == 2
    path.rmdir()
    watch.feed.offer("run", [(HEADER, row(400))])
    wait_for(lambda: len(alerts_of_run(root / "run.zarr")) == 1, "the third alert")


def test_a_run_that_was_removed_and_begun_again_fires_again(watch: RuleWatch, root: Path) -> None:
    watch.feed.offer("run", [(HEADER, row(5))])
    wait_for(lambda: alerts_of_run(root / "run.zarr"), "the first alert")
    (root / "run.zarr").rename(root / "old")
    (root / "run.zarr" / ".capd" / "node=n").mkdir(parents=True)
    watch.feed.offer("run", [(HEADER, row(5))])
    wait_for(lambda: alerts_of_run(root / "run.zarr"), "the alert of the new run")
    shutil.rmtree(root / "old")
    assert watch.stats().suppressed == 0


def test_a_flight_recorder_is_asked_and_without_one_the_rule_is_refused(root: Path) -> None:
    rules = parse_triggers([{**NAN, "action": "keep"}])
    with pytest.raises(ConfigError, match=r'trigger .nan.: action: "keep" needs \[window\]'):
        RuleWatch(rules, root, "n", durable=False, statistics=True)
    keeper = Kept()
    watch = RuleWatch(rules, root, "n", durable=False, statistics=True, keeps=True)
    watch.begin(cast("RankLooks", NoLooks()), AlertActions(keeper, Ordered().order))
    watch.feed.offer("run", [(HEADER, row(37))])
    watch.stop(30.0)
    assert keeper.asked == [("run", 37, "nan", None)]


def test_a_rule_says_how_much_is_kept_after_it_and_a_refusal_is_logged(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = parse_triggers([{**NAN, "action": "keep", "post": 2}])
    keeper = Kept("the disk is full")
    watch = RuleWatch(rules, root, "n", durable=False, statistics=True, keeps=True)
    watch.begin(cast("RankLooks", NoLooks()), AlertActions(keeper, Ordered().order))
    watch.feed.offer("run", [(HEADER, row(37))])
    watch.stop(30.0)
    assert keeper.asked == [("run", 37, "nan", 2)]
    assert "[trigger] run run: nan keeps nothing: the disk is full" in [one.message for one in caplog.records]


def test_rules_give_orders_to_the_ranks_and_a_refusal_is_logged(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = parse_triggers(
        [{**NAN, "name": "less", "action": "stop-capture"}, {**NAN, "name": "more", "action": "capture"}]
    )
    caplog.set_level("INFO", "capd")
    ranks = Ordered(ControlReply("ok", "ordered from iteration 9 on"), ControlReply("nothing", "no rank"))
    watch = RuleWatch(rules, root, "n", durable=False, statistics=True)
    watch.begin(cast("RankLooks", NoLooks()), AlertActions(Kept(), ranks.order))
    watch.feed.offer("run", [(HEADER, row(5))])
    watch.stop(30.0)
    assert ranks.orders == [Control("stop", "run"), Control("start", "run", Selection(steps="all"))]
    said = [(one.levelname, one.message) for one in caplog.records]
    assert ("INFO", "[trigger] run run: less: stop-capture: ordered from iteration 9 on") in said
    assert ("WARNING", "[trigger] run run: more: capture: no rank") in said


def test_commands_that_do_not_fit_are_counted_and_the_running_one_ends_with_the_daemon(
    tmp_path: Path,
) -> None:
    commands = AlertCommands()
    for _ in range(MAX_COMMANDS + 5):
        commands.run(["sleep", "600"], b"{}")
    wait_for(lambda: commands.left_out >= 4, "too many commands")
    began = time.monotonic()
    commands.stop(0.2)
    assert time.monotonic() - began < 20


def test_a_command_gets_few_variables_and_its_failure_is_counted(tmp_path: Path) -> None:
    commands = AlertCommands({"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "x", "CAPD_ENDPOINT": "y"})
    script = "import sys, os, json; json.dump([sys.stdin.read(), dict(os.environ)], open(sys.argv[1], 'w'))"
    commands.run([sys.executable, "-c", script, str(tmp_path / "said")], b"a line\n")
    commands.run(["false"], b"x" * 1_000_000)
    commands.run(["/nowhere/it"], b"")
    commands.stop(30.0)
    told, environment = json.loads((tmp_path / "said").read_text())
    assert told == "a line\n"
    assert environment.keys() - {"LC_CTYPE"} == {"PATH"}
    assert (commands.failed, commands.left_out) == (2, 0)


def test_a_flood_of_records_hides_no_silent_rank(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are looked at while records still come."""
    silent = {"name": "silent", "metric": "silent", "above": 60}
    watch = RuleWatch(parse_triggers([NAN, silent]), root, "n", durable=False, statistics=True)

    class Looks:
        def look(self) -> Iterator[RankLook]:
            yield RankLook("run", 3, 0, 7, 61.0, 0)

    left = [2000]

    def endless() -> tuple[str, list[tuple[SeriesHeader, RecordRow]]] | None:
        left[0] -= 1
        if any(one.rule == "silent" for one in alerts_of_run(root / "run.zarr")) or not left[0]:
            return None
        return "run", [(HEADER, row(0, 1.0))] * 1000

    monkeypatch.setattr(watch.feed, "take", endless)
    watch._looks = Looks()  # type: ignore[assignment]
    watch._records()
    assert left[0] > 0
    assert [one.rank for one in alerts_of_run(root / "run.zarr")] == [3]


def test_a_run_that_was_forgotten_for_others_counts_its_day_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capd.server.rules.watch._MOST_RUNS", 1)
    watch = RuleWatch(
        parse_triggers([{**NAN, "cooldown": 0, "max_per_day": 3}]), root, "n", durable=False, statistics=True
    )
    (root / "other.zarr" / ".capd" / "node=n").mkdir(parents=True)
    for number in range(6):
        for run in ("run", "other"):
            watch.feed.offer(run, [(HEADER, row(number))])
            watch._records()
            watch._report(watch._judge.ready(0.0, all_of_them=True))
    assert len(alerts_of_run(root / "run.zarr")) == 3


def test_rows_of_errors_are_judged_and_what_does_not_fit_is_counted(root: Path) -> None:
    rules = parse_triggers([{"name": "low", "metric": "sqnr:mxfp8", "below": 20, "cooldown": 0}])
    with pytest.raises(ConfigError, match=r"sqnr:mxfp8 needs mxfp8 in \[lab\] formats; it has nvfp4"):
        RuleWatch(rules, root, "n", durable=False, statistics=True, lab_formats=["nvfp4"])
    watch = RuleWatch(rules, root, "n", durable=False, statistics=False, lab_formats=["mxfp8"])
    assert watch.wants_errors
    watch.errors.offer("run", [measured(step, fine=True) for step in range(MAX_WAITING_ERRORS - 1)])
    watch.errors.offer("run", [measured(5, fine=True), measured(6)])
    watch.errors.offer("run", [measured(7)])
    watch.start()
    watch.stop(60.0)
    [alert] = alerts_of_run(root / "run.zarr")
    assert (alert.iteration, alert.series, alert.value, alert.metric) == (7, "a/b", 10.0, "sqnr:mxfp8")
    stats = watch.stats()
    assert (stats.errors, stats.errors_left_out) == (MAX_WAITING_ERRORS + 2, 2)
    assert watch.counters().left_out == 2


def test_a_flood_of_records_does_not_hold_errors_back(root: Path) -> None:
    """One batch of each kind in turn: the alert of the errors is in the file before the last records are judged."""
    rules = parse_triggers([NAN, {"name": "low", "metric": "sqnr:mxfp8", "below": 20}])
    watch = RuleWatch(rules, root, "n", durable=False, statistics=True, lab_formats=["mxfp8"])
    for step in (0, 1000):
        watch.feed.offer("run", [(HEADER, row(step, 1.0))])
    watch.errors.offer("run", [measured(3)])
    steps = watch._judged()
    next(steps), next(steps)
    assert [one.iteration for one in watch._judge.ready(0.0, all_of_them=True)] == [3]
    next(steps)
    assert next(steps, "the end") == "the end"
