"""Calls of frameworks are known from their start, also those through what the job kept; and trials are no training."""

from __future__ import annotations

import gc
import importlib
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FRAMEWORK = "deepspeed.runtime.engine"


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], ModuleType]]:
    """Imports a stand-in for DeepSpeed, whose `forward` calls what it is given, while calls are followed."""
    import _capd_calls

    package = tmp_path / "deepspeed" / "runtime"
    package.mkdir(parents=True)
    (package / "engine.py").write_text(
        textwrap.dedent("""
            class DeepSpeedEngine:
                def forward(self, inside, *args, **kwargs):
                    return inside(self, *args, **kwargs)
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    before = list(sys.meta_path)
    monkeypatch.setattr(_capd_calls, "places", {})
    _capd_calls.begin()
    yield lambda: importlib.import_module(FRAMEWORK)
    _capd_calls.end()
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]
    assert sys.meta_path == before
    assert not _capd_calls._calls


def test_a_call_is_under_way_from_its_start_to_its_end(imported: Callable[[], ModuleType]) -> None:
    from _capd_calls import under_way

    ended = []

    def inside(engine: Any, number: int, *, name: str) -> list[Any]:
        [call] = under_way()
        call.ended.append(lambda: ended.append(name))
        assert (call.args[0], call.args[2], call.kwargs, call.known) == (engine, 7, {"name": name}, False)
        return [number, name, *ended]

    engine = imported().DeepSpeedEngine()
    assert engine.forward(inside, 7, name="x") == [7, "x"]
    assert ended == ["x"]
    assert under_way() == []
    with pytest.raises(ZeroDivisionError):
        engine.forward(lambda _: 1 / 0)
    assert under_way() == []


def test_a_call_that_was_counted_leaves_its_batch_without_the_collector(
    imported: Callable[[], ModuleType],
) -> None:
    from _capd_calls import under_way

    class Batch:
        pass

    def inside(_engine: Any, _batch: Batch) -> None:
        [call] = under_way()
        call.ended.append(lambda: call.args)

    batch = Batch()
    left = weakref.ref(batch)
    gc.disable()
    try:
        imported().DeepSpeedEngine().forward(inside, batch)
        del batch
        assert left() is None
    finally:
        gc.enable()


def test_what_the_job_kept_is_counted_from_the_moment_that_something_counts(
    imported: Callable[[], ModuleType],
) -> None:
    from _capd_calls import places

    engine = imported().DeepSpeedEngine()
    kept = engine.forward
    [place] = [place for (module, _, _), place in places.items() if module == FRAMEWORK]
    counted = []

    def counting(*args: Any) -> Any:
        counted.append(args[0])
        return place.method(*args)

    assert kept(lambda _: "before") == "before"
    place.counted = counting
    assert kept(lambda _: "during") == "during"
    place.counted = None
    assert kept(lambda _: "after") == "after"

    assert counted == [engine]
    assert kept.__name__ == "forward"


def test_all_that_can_be_under_way_when_a_model_is_found_is_followed() -> None:
    from _capd_calls import METHODS

    from capd_client.integrations.counters.frameworks import PATCHES

    adopted = {(patch.module, patch.owner, patch.method) for patch in PATCHES if patch.adopt is not None}
    assert set(METHODS) == adopted
    assert len(METHODS) == len(adopted)


def test_both_sides_know_the_same_trials() -> None:
    import _capd_trials

    from capd_client.steps import trial_runs
    from capd_client.watching import graphed_callables

    assert _capd_trials.MODES == trial_runs.MODES
    assert _capd_trials.GRAPHING == graphed_callables.GRAPHING
