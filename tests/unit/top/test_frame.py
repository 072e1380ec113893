"""Frames are plain data: their size is exact, their content follows the state, and their keys do what the help says."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from capd.live.events import LiveEvent
from capd.live.state import Earlier, LiveSample, NodeState, RunState, newest_sessions, ranks_of
from capd.metrics import AlertStats, LabStats, SessionStats, UploadStats
from capd.top.columns import shown_columns
from capd.top.frame import frame, overview
from capd.top.lines import plain
from capd.top.ranks import RANK_COLUMNS
from capd.top.records import RECORD_COLUMNS
from capd.top.text import width_of
from capd.top.view import TopData, TopView
from tests.kit.live.answers import new_record, session

EVIL = "[bold red]x[/] \x1b[31m层[link=http://e]"


def run_state(ranks: int = 4, run_id: str = "exp7", **changes: Any) -> RunState:
    sessions: list[SessionStats] = changes.pop(
        "sessions", [session(number, iteration=10 + number % 3, committed=number) for number in range(ranks)]
    )
    values: dict[str, Any] = {
        "run_id": run_id, "path": "/s/r.zarr", "ranks": ranks_of(newest_sessions(sessions), Earlier()),
        "omitted_ranks": 0, "earlier": 0, "offered": 9, "committed": 8, "in_flight": 1, "records": 8, "raw_bytes": 4096,
        "stored_bytes": 1024, "rate": 12.0, "nbytes_s": 2048.0, "dropped": {}, "left_out": {}, "sealed": False,
        "why_full": "",
    }  # fmt: skip
    return RunState(**{**values, **changes})


def data_of(*runs: RunState, **changes: Any) -> TopData:
    values: dict[str, Any] = {
        "node": "node1", "version": "1", "pid": 7, "store": "/s", "uptime_s": 99.0, "connections": 1, "arriving": 0,
        "disk_free": 9 << 30, "keep_free": 1 << 30, "max_disk": None, "room": 8 << 30, "fill_s": 1e6,
        "full_in_s": 8590.0, "oldest_s": 0.2, "runs": runs, "omitted_runs": 0,
    }  # fmt: skip
    more = {
        name: changes.pop(name)
        for name in ("records", "events", "note", "run_rates", "rank_rates", "alerts", "alerts_problem")
        if name in changes
    }
    sample = LiveSample(1, NodeState(**{**values, **changes}))
    shown = TopView().run(TopData(sample))
    more["run_id"] = "" if shown is None else shown.run_id
    return TopData(**{"sample": sample, "records": [new_record(n) for n in range(30)][::-1], **more})


def shown(view: TopView, data: TopData, width: int = 100, height: int = 30) -> str:
    lines = frame(view, data, width, height)
    assert len(lines) == height
    assert {width_of("".join(span.text for span in line)) for line in lines} == {width}
    return "\n".join(map(plain, lines))


def press(view: TopView, data: TopData, *keys: str) -> None:
    for key in keys:
        assert view.press(key, key if len(key) == 1 else None, data)


def column(text: str, at: int = 0) -> list[str]:
    """The cells of a table's column, which end at the first line without a number there."""
    rows = text.splitlines()
    start = next(number for number, row in enumerate(rows) if "main reason" in row) + 1
    return [cells[at] for row in rows[start:] if (cells := row.split()) and cells[at].isdigit()]


@pytest.mark.parametrize("height", [1, 2, 3, 5, 10, 14, 24, 50, 100])
@pytest.mark.parametrize("pane", ["", "records", "drops"])
def test_every_size_of_a_terminal_is_filled_exactly(height: int, pane: Any) -> None:
    full = data_of(
        run_state(
            64, dropped={"disk_full": 3, EVIL: 9}, left_out={"sampled": 1}, why_full=EVIL, omitted_ranks=2
        ),
        run_state(1, EVIL),
        node=EVIL,
        events=tuple(LiveEvent(n, "warning", EVIL, EVIL) for n in range(300)),
        records=[new_record(n, module=EVIL, path=EVIL, dtype=EVIL) for n in range(200)],
        run_rates=[None, *map(float, range(59))],
        upload=UploadStats(
            to="s3://b",
            state="failed",
            problem=EVIL,
            note="",
            objects=1,
            bytes=1,
            failures={},
            backlog_bytes=1,
            oldest_s=1,
        ),
        note=EVIL,
    )
    gone = replace(full, sample=replace(full.sample, problem=EVIL * 9, silent_s=70.0))
    for data in (full, gone, TopData(), TopData(LiveSample(problem=EVIL)), data_of()):
        for width in (40, 41, 66, 80, 129, 130, 160, 200):
            for overlay in ("", "help", "rank", "record"):
                view = TopView(run_id=None, pane=pane)
                if overlay in ("rank", "record"):
                    view.focus = "ranks" if overlay == "rank" else "records"
                    view.press("enter", None, data)
                elif overlay:
                    view.press("?", "?", data)
                shown(view, data, width, height)


def test_names_are_shown_as_they_are_but_for_what_a_terminal_obeys() -> None:
    text = shown(TopView(), data_of(run_state(1, EVIL), records=[new_record(0, module=EVIL)]), 160, 30)

    assert "[bold red]x[/] �[31m层[link=http://e]" in text
    assert "\x1b" not in text


def test_a_narrow_terminal_shows_fewer_columns_and_loses_no_rank() -> None:
    data = data_of(run_state(64))
    narrow = shown(TopView(pane=""), data, 40, 100).splitlines()
    header = next(row for row in narrow if row.startswith("rank▾"))

    assert header.split() == ["rank▾", "step", "rec/s", "state", "dropped"]
    rows = [
        row.split()[0] for row in narrow[narrow.index(header) + 1 :] if row.startswith("  ") and "live" in row
    ]
    assert rows == [str(number) for number in range(64)]
    wide = shown(TopView(pane=""), data, 200, 80)
    assert "main reason" in wide
    assert "host" in wide


@pytest.mark.parametrize("columns", [RANK_COLUMNS, RECORD_COLUMNS], ids=["ranks", "records"])
def test_the_columns_of_a_table_fit_it(columns: Any) -> None:
    for width in range(40, 201):
        taken = [room for _, room in shown_columns(columns, width)]
        assert sum(taken) + len(taken) - 1 <= width


def test_the_head_says_what_matters() -> None:
    data = data_of(
        run_state(
            sessions=[session(0, iteration=5), session(1, state="died", end="SIGKILL")],
            dropped={"arena_full": 7},
        ),
        full_in_s=120.0,
    )
    text = shown(TopView(), data, 120, 30)

    for part in (
        "node node1", "run exp7", "ranks 1 live of 2", "step 5", "committed 8 12/s 2.0 KiB/s",
        "dropped 7 (7 arena_full)", "room 8.0 GiB, full in 2 min", "disk free 9.0 GiB", "ratio 4.00",
    ):  # fmt: skip
        assert part in text, part


def test_a_daemon_that_is_gone_greys_its_last_values_below_a_banner() -> None:
    data = data_of(run_state())
    data = replace(
        data, sample=replace(data.sample, problem="no daemon at /x; start `capd serve`", silent_s=12.0)
    )
    lines = frame(TopView(), data, 100, 30)

    assert plain(lines[0]).startswith(" DAEMON GONE for 12 s; the last values are shown")
    assert lines[0][0].style == "bold white on red"
    assert {span.style for line in lines[2:-1] for span in line if span.text.strip()} == {"dim"}
    assert "exp7" in shown(TopView(), data)
    assert "WAITING FOR THE DAEMON" in shown(TopView(), TopData(LiveSample(problem="no daemon at /x")))


def test_a_figure_that_grows_moves_no_other_line() -> None:
    view = TopView()
    few = run_state(dropped={"arena_full": 1})
    many = replace(
        few, dropped={"arena_full": 10**9, "ring_full": 10**8, "quota": 10**7}, left_out={"sampled": 10**9}
    )
    for run in (many, few):
        rows = shown(view, data_of(run), 60, 30).splitlines()
        place = next(number for number, row in enumerate(rows) if row.startswith("rank▾"))
        assert place == 6


def test_sort_puts_what_one_looks_for_first() -> None:
    sessions = [
        session(0, iteration=9, in_flight=1), session(1, iteration=7, dropped={"quota": 5}), session(2, in_flight=8),
        session(3, iteration=9, state="died", connected=False),
    ]  # fmt: skip
    data, view = data_of(run_state(sessions=sessions)), TopView(pane="")
    seen = {}
    for _ in range(6):
        seen[view.rank_order] = column(shown(view, data))
        press(view, data, "s")

    assert view.rank_order == "rank"
    assert seen["rank"] == ["0", "1", "2", "3"]
    assert seen["step"][0] == "1"
    assert seen["in flight"][:2] == ["2", "0"]
    assert seen["dropped"][0] == "1"
    assert seen["state"][-1] == "3"


def test_the_filter_is_typed_kept_and_cleared() -> None:
    sessions = [session(n, host=f"node{n % 2}") for n in range(6)]
    data, view = data_of(run_state(sessions=sessions)), TopView(pane="")
    press(view, data, "/", "n", "o", "d", "e", "1", "q")
    assert "/node1q▏" in shown(view, data)
    assert "no rank matches the filter" in shown(view, data)
    press(view, data, "backspace")
    assert column(shown(view, data)) == ["1", "3", "5"]
    press(view, data, "enter")
    assert "filter node1: 3 of 6 ranks" in shown(view, data)
    press(view, data, "/", "ctrl+u", "x", "escape")
    assert column(shown(view, data)) == ["1", "3", "5"]
    press(view, data, "escape")
    assert len(column(shown(view, data))) == 6
    press(view, data, "/")
    view.paste("no\x1b[31mde0\n" + "y" * 500)
    assert view.typing is not None
    assert view.typing.isprintable()
    assert len(view.typing) == 80


def test_records_are_filtered_by_pattern_and_sorted() -> None:
    clean, bad = new_record(1, module="a.q_proj"), new_record(2, module="b.k_proj")
    assert bad.stats is not None
    bad = replace(bad, stats=replace(bad.stats, nan=3, absmax=1.0))
    data, view = data_of(run_state(), records=[bad, clean]), TopView(focus="records")
    press(view, data, "/", *"q*input", "enter")
    assert [record.key.module for record in view.records(data)] == ["a.q_proj"]
    press(view, data, "escape", "s", "s")
    assert view.record_order == "absmax"
    assert view.records(data) == [clean, bad]
    press(view, data, "s")
    assert view.records(data) == [bad, clean]


def test_the_cursor_stays_with_its_item() -> None:
    data, view = data_of(run_state(6)), TopView(pane="")
    shown(view, data)
    press(view, data, "down", "down", "down", "up")
    assert view.rank_under_cursor(data).rank == 2  # type: ignore[union-attr]
    press(view, data, "s")
    assert view.rank_under_cursor(data).rank == 2  # type: ignore[union-attr]
    press(view, data, "end")
    assert view.rank_under_cursor(data) == view.ranks(data)[-1]
    press(view, data, "home")
    assert view.rank_under_cursor(data) == view.ranks(data)[0]
    # The rank at the cursor is gone: the cursor stays in the list.
    press(view, data, "end")
    fewer = data_of(run_state(3))
    assert view.rank_under_cursor(fewer) in view.ranks(fewer)
    assert view.rank_under_cursor(data_of()) is None


def test_the_first_row_follows_the_newest_record_until_the_cursor_moves() -> None:
    records = [new_record(n) for n in range(9)][::-1]
    data, view = data_of(run_state(), records=records), TopView(focus="records")
    assert view.under_cursor(data) == records[0]
    newer = replace(data, records=[new_record(9), *records])
    assert view.under_cursor(newer).number == 9  # type: ignore[union-attr]
    press(view, newer, "down")
    newest = replace(data, records=[new_record(10), *newer.records])
    assert view.under_cursor(newest).number == 8  # type: ignore[union-attr]


def test_details_of_a_record_have_its_statistics_and_histogram() -> None:
    data, view = data_of(run_state(), records=[new_record(3)]), TopView(focus="records")
    press(view, data, "enter")
    text = shown(view, data)

    for part in (
        "m.0 forward.input",
        "m.input#3",
        "step 3",
        "2×2 bfloat16",
        "count 4",
        "absmax 3",
        "mean 0.5",
        "2^0 ",
        "####",
    ):
        assert part in text, part
    # It stays when newer records push it out of the list.
    assert "m.input#3" in shown(view, replace(data, records=[]))
    press(view, data, "escape")
    assert view.overlay == ""


def test_details_of_a_rank_go_on_with_its_newest_state() -> None:
    sessions = [
        session(
            0, committed=5, dropped={"arena_full": 2, "sampled": 4}, arena_bytes=1 << 20, arena_used=1 << 19
        )
    ]
    data, view = data_of(run_state(sessions=sessions), rank_rates=[1.0] * 60), TopView()
    press(view, data, "enter")
    text = shown(view, data)
    for part in (
        "committed 5",
        "arena 1.0 MiB  512.0 KiB hold open captures",
        "2 dropped: arena_full",
        "4 left out: sampled",
        "█",
    ):
        assert part in text, part
    assert "committed 6" in shown(view, data_of(run_state(sessions=[session(0, committed=6)])))


def test_drops_name_the_setting_that_helps() -> None:
    data = data_of(
        run_state(dropped={"arena_full": 3, "disk_full": 1}, why_full="max_disk is reached; raise it")
    )
    view = TopView()
    press(view, data, "d")
    text = shown(view, data)
    assert "raise CAPD_ARENA_BYTES" in text
    assert "max_disk is reached; raise it" in text
    press(view, data, "d")
    assert "CAPD_ARENA_BYTES" not in shown(view, data)
    assert "nothing was dropped" in shown(TopView(pane="drops"), data_of(run_state()))


def test_r_goes_through_the_runs_and_a_missing_run_is_named() -> None:
    old, new = run_state(1, "old"), run_state(2, "new")
    data, view = data_of(old, new), TopView()
    assert view.run(data) == new
    press(view, data, "r")
    assert view.run(data) == old
    press(view, data, "r")
    assert view.run(data) == new
    assert "run new (2 of 2)" in shown(view, data)
    assert "the daemon has no run other; r shows the others" in shown(TopView(run_id="other"), data)
    # A run with live ranks goes before a newer one without.
    ended = run_state(sessions=[session(0, state="ended", connected=False)], run_id="ended")
    assert TopView().run(data_of(old, ended)) == old


def test_keys_that_leave_and_keys_that_switch() -> None:
    data, view = data_of(run_state()), TopView()
    for key in ("q", "ctrl+c", "ctrl+q"):
        assert not TopView().press(key, key if len(key) == 1 else None, data)
    press(view, data, "tab")
    assert view.focus == "records"
    press(view, data, "t")
    assert (view.pane, view.focus) == ("", "ranks")
    press(view, data, "tab")
    assert view.focus == "ranks"
    press(view, data, "t")
    assert (view.pane, view.focus) == ("records", "records")
    press(view, data, "p")
    assert " PAUSED " in shown(view, data)
    press(view, data, "?")
    assert "quit" in shown(view, data)
    # Keys of lists do nothing there.
    press(view, data, "s", "d")
    assert view.overlay == "help"
    press(view, data, "end")
    assert "max_disk" in shown(view, data)
    press(view, data, "enter")
    assert view.overlay == ""


def test_the_mouse_moves_the_cursor_and_opens_details() -> None:
    data, view = data_of(run_state(6)), TopView()
    rows = shown(view, data, 160, 30).splitlines()
    y = next(number for number, row in enumerate(rows) if row.startswith("    3 "))
    view.click(5, y, data)
    assert view.rank_under_cursor(data).rank == 3  # type: ignore[union-attr]
    view.click(120, y, data)
    assert view.focus == "records"
    view.click(120, y, data)
    assert view.overlay == "record"
    view.click(5, y, data)
    assert view.overlay == "record"


def test_a_frame_for_a_pipe_has_every_rank_once() -> None:
    data = data_of(run_state(64, dropped={"arena_full": 1}))
    lines = [plain(line) for line in overview(TopView(), data, 100)]

    assert column("\n".join(lines))[:64] == [str(number) for number in range(64)]
    assert any("raise CAPD_ARENA_BYTES" in row for row in lines)
    assert sum("forward.input" in row for row in lines) == 20


def rules(**changes: Any) -> AlertStats:
    values: dict[str, Any] = {
        "rules": 1, "alerts": 0, "suppressed": 0, "records": 9, "records_left_out": 0, "errors": 0,
        "errors_left_out": 0, "series_forgotten": 0, "not_stored": 0, "commands_failed": 0, "commands_left_out": 0,
        "last": None, "last_ns": None, "last_severity": None, "last_run": None,
    }  # fmt: skip
    return AlertStats(**{**values, **changes})


def test_alerts_are_counted_in_the_head() -> None:
    run = run_state()

    def head(**changes: Any) -> tuple[str, str]:
        """The item and its style."""
        for line in frame(TopView(), data_of(run, **changes), 130, 30)[:6]:
            for label, text in pairwise(line):
                if label.text == "alerts ":
                    return text
        return ("", "")

    assert head() == ("", "")
    assert head(rules=rules()) == ("0", "")
    assert head(rules=rules(), alerts={"info": 2}) == ("2", "")
    assert head(alerts={"warning": 2, "info": 1}) == ("3", "yellow")
    assert head(rules=rules(not_stored=3, records_left_out=4), alerts={"warning": 1, "critical": 1}) == (
        "2 (1 critical), 3 only in the log, 4 records not judged", "bold red",
    )  # fmt: skip
    assert head(alerts_problem="no \x1bfile") == ("0, cannot be read: no �file", "yellow")


def test_alerts_are_marked_events_with_severity_and_colour() -> None:
    now = time.time_ns()
    events = tuple(
        LiveEvent(now, severity, f"nan: {EVIL}", "exp7", is_alert=True)
        for severity in ("info", "warning", "critical")
    )
    old = LiveEvent(now - 3 * 86_400 * 10**9, "warning", "an old one")
    data = data_of(run_state(), events=(old, *events, LiveEvent(now, "info", "rank 0 here", "exp7")))
    spans = [span for line in frame(TopView(), data, 100, 60) for span in line]
    shown = {span.text[9:].strip(): span.style for span in spans if " alert, " in span.text}

    safe = "exp7: {} alert, nan: [bold red]x[/] �[31m层[link=http://e]".format
    assert shown == {safe("info"): "", safe("warning"): "yellow", safe("critical"): "bold red"}
    [day] = [span.text for span in spans if "an old one" in span.text]
    assert day.startswith(time.strftime("%m-%d %H:%M an old", time.localtime(old.time_ns / 1e9)))
    lines = [plain(line) for line in overview(TopView(), data, 100)]
    assert sum(" alert, " in line for line in lines) == 3
    assert not any("rank 0 here" in line for line in lines)


def test_the_lab_takes_one_item_of_the_head() -> None:
    records = {"measured": 1200, "budget": 30, "memory": 4, "failed": 0}
    lab = LabStats(
        formats=["mxfp8"], sample="1/8", cpu=0.2, problem="", records=records, waiting=3, waiting_bytes=9, cpu_s=1.0,
        restarts=0,
    )  # fmt: skip
    assert "lab 1,200 measured, 3 wait, 34 not (budget)" in shown(
        TopView(), data_of(run_state(), lab=lab), 160
    )
    broken = lab.model_copy(update={"problem": "no memory", "records": {"measured": 0}, "waiting": 0})
    assert "lab 0 measured, no memory" in shown(TopView(), data_of(run_state(), lab=broken), 160)


@pytest.mark.parametrize("is_paused", [True, False])
def test_the_next_run_has_nothing_of_the_run_before(*, is_paused: bool) -> None:
    data = data_of(
        run_state(1, "old"),
        run_state(2, "new"),
        alerts={"critical": 4},
        run_rates=[5.0] * 60,
        note="9 records passed",
    )
    view = TopView(paused=is_paused, focus="records")
    assert "forward.input" in shown(view, data)
    press(view, data, "r")
    text = shown(view, data)

    assert "run old (1 of 2)" in text
    assert not any(part in text for part in ("forward.input", "critical", "█", "9 records passed"))
    assert "not read yet" in text
    press(view, data, "enter")
    assert view.overlay == ""
