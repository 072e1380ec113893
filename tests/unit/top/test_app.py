"""The Textual application, driven by its pilot: keys, sizes, 64 ranks, names from outside, a daemon that is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.live.answers import Answers, run, session

pytest.importorskip("textual", reason="the screen needs textual")

from textual.geometry import Region
from textual.pilot import Pilot

from capd.top.app import FrameWidget, TopApp
from capd.top.lines import plain

EVIL = "[bold red]evil[/] [@click=app.bell]x[/] [link=http://e]"
PATIENCE_S = 30.0
Steps = Callable[[TopApp, Pilot[None]], Awaitable[None]]


@pytest.fixture
def daemon(runtime_dir: Path) -> Iterator[Answers]:
    answers = Answers(runtime_dir / "s.sock")
    answers.start()
    yield answers
    answers.stop()


def drive(
    daemon: Answers,
    steps: Steps,
    *,
    size: tuple[int, int] = (100, 30),
    **app: Any,
) -> TopApp:
    """Run the application on a terminal of this size; returns it after its end."""
    made = TopApp(daemon.path, interval_s=0.1, **app)

    async def session_of() -> None:
        async with made.run_test(size=size) as pilot:
            await steps(made, pilot)

    asyncio.run(session_of())
    return made


def text(app: TopApp) -> str:
    return "\n".join(map(plain, app.lines))


def drawn(app: TopApp) -> str:
    """What the widgets would write: the screen as the terminal has it."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


async def until(pilot: Pilot[None], condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"{what}:\n{text(pilot.app)}"  # type: ignore[arg-type]
        await pilot.pause(0.02)


def test_the_screen_shows_what_the_daemon_says_and_follows_it(daemon: Answers) -> None:
    daemon.runs = [run("exp7", [session(0, iteration=3)], committed=5)]

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "run exp7" in text(app), "the run")
        daemon.runs = [run("exp7", [session(0, iteration=4), session(1, iteration=2)], committed=9)]
        await until(pilot, lambda: "ranks 2 live of 2" in text(app), "the second rank")
        await until(pilot, lambda: "ranks 2 live of 2" in drawn(app), "the second rank on the screen")
        assert "exp7: rank 1 joined" in drawn(app)

    assert drive(daemon, steps).return_code in (0, None)


def test_keys_work(daemon: Answers) -> None:
    ranks = [session(n, iteration=9 - n, dropped={"arena_full": n} if n else {}) for n in range(4)]
    daemon.runs = [run("old", [session(0)]), run("exp7", ranks, dropped={"arena_full": 6})]

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "run exp7" in text(app), "the run")
        await pilot.press("question_mark")
        assert "move the cursor" in text(app)
        await pilot.press("escape", "s")
        assert app.view.rank_order == "step"
        await pilot.press("d")
        assert "raise CAPD_ARENA_BYTES" in text(app)
        await pilot.press("slash", *"rank 2", "enter")
        assert [rank.rank for rank in app.view.ranks(app.shown)] == [2]
        await pilot.press("enter")
        assert "2 dropped: arena_full" in text(app)
        await pilot.press("escape", "escape", "t", "tab", "r")
        await until(pilot, lambda: "run old (1 of 2)" in text(app), "the other run")
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running, "the end")

    assert drive(daemon, steps).failure is None


def test_pause_keeps_the_screen_and_goes_on_sampling(daemon: Answers) -> None:
    daemon.runs = [run("exp7", [session(0)], committed=5)]

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "committed 5" in text(app), "the first value")
        await pilot.press("p")
        daemon.runs = [run("exp7", [session(0)], committed=6)]
        await until(pilot, lambda: app._newest.sample.node.runs[0].committed == 6, "the next sample")
        assert "committed 5" in text(app)
        assert "PAUSED" in text(app)
        await pilot.press("p")
        assert "committed 6" in text(app)

    drive(daemon, steps)


def test_64_ranks_at_every_width(daemon: Answers) -> None:
    daemon.runs = [run("exp7", [session(n, iteration=n, host=f"node{n:03}") for n in range(64)])]

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "ranks 64 live of 64" in text(app), "the ranks")
        for width, height in (
            (40, 24),
            (80, 24),
            (100, 10),
            (129, 50),
            (130, 50),
            (200, 80),
            (40, 8),
            (66, 3),
        ):
            await pilot.resize_terminal(width, height)
            await until(
                pilot, lambda size=(width, height): app.size == size and len(app.lines) == size[1], "the size"
            )
            await until(pilot, lambda rows=height: len(drawn(app).splitlines()) == rows, "the rows")
            assert max(map(len, drawn(app).splitlines())) <= width
            if width >= 130:
                # Both parts are on the screen.
                await until(
                    pilot, lambda: "main reason" in drawn(app) and "tensor" in drawn(app), "both parts"
                )
        await pilot.resize_terminal(100, 24)
        await pilot.press("end")
        await until(pilot, lambda: "   63" in drawn(app), "the last rank")

    drive(daemon, steps)


def test_names_from_outside_are_never_markup(daemon: Answers) -> None:
    daemon.runs = [
        run(EVIL, [session(0, host=EVIL, state="died", end=EVIL, connected=False)], dropped={EVIL: 3})
    ]
    daemon.more = {"node": EVIL}

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: f"node {EVIL}" in drawn(app) and f"run {EVIL}" in drawn(app), "the names")
        await pilot.press("enter")
        await until(pilot, lambda: f"host {EVIL}" in drawn(app), "the host")
        strips = app.screen._compositor.render_strips()
        styles = [
            segment.style for strip in strips for segment in strip if segment.style and "evil" in segment.text
        ]
        assert styles
        assert all(style.link is None and not style.meta for style in styles)

    drive(daemon, steps, size=(180, 40))


def test_a_daemon_that_goes_leaves_a_banner_and_comes_back(daemon: Answers) -> None:
    daemon.runs = [run("exp7", [session(0)], committed=5)]

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "committed 5" in text(app), "the first value")
        daemon.stop()
        await until(pilot, lambda: "DAEMON GONE" in drawn(app), "the banner")
        assert "committed 5" in drawn(app)
        await pilot.press("s", "d", "question_mark", "escape")
        daemon.start()
        await until(pilot, lambda: "DAEMON GONE" not in drawn(app), "the daemon again")

    assert drive(daemon, steps).failure is None


def test_nothing_that_did_not_change_is_drawn_again(daemon: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.runs = [run("exp7", [session(n, iteration=5) for n in range(8)])]
    regions: list[tuple[Region, ...]] = []
    refresh = FrameWidget.refresh

    def noted(self: FrameWidget, *given: Region, **more: Any) -> FrameWidget:
        regions.append(given)
        return refresh(self, *given, **more)

    async def steps(app: TopApp, pilot: Pilot[None]) -> None:
        await until(
            pilot, lambda: "ranks 8 live" in text(app) and app.shown.sample.node.runs[0].rate == 0, "rates"
        )
        await pilot.pause(0.3)
        row = next(y for y, line in enumerate(app.lines) if plain(line).startswith("    3 "))
        before = app.shown
        monkeypatch.setattr(FrameWidget, "refresh", noted)
        daemon.runs = [run("exp7", [session(n, iteration=6 if n == 3 else 5) for n in range(8)])]
        await until(pilot, lambda: app.shown is not before and "  6 " in text(app), "the next step")
        monkeypatch.undo()
        changed = {(region.y, region.x, region.right) for given in regions for region in given}
        # The step of rank 3, and that the others are behind it.
        of_row = [one for one in changed if one[0] == row]
        assert of_row
        assert all(x >= 5 for _, x, _ in of_row)
        # Never the whole screen.
        assert all(given for given in regions)
        assert not {y for y, _, _ in changed} >= set(range(len(app.lines)))

    drive(daemon, steps)
