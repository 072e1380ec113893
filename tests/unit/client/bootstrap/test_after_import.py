"""Waiting for an import: once, at its end, and as if nobody waited for everything else that looks at the module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NAME = "capd_test_awaited"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Write the module that is waited for."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> Path:
        path = tmp_path / f"{NAME}.py"
        path.write_text(text)
        importlib.invalidate_caches()
        return path

    yield write
    sys.modules.pop(NAME, None)


@pytest.fixture
def calls() -> Iterator[list[object]]:
    """What the waiting function saw of the module; the finder is gone once the test is over."""
    from _capd_after_import import _finder, after_import

    before = list(sys.meta_path)
    seen: list[object] = []
    after_import(NAME, lambda: seen.append(getattr(sys.modules[NAME], "value", None)))
    yield seen
    _finder._waiting.clear()
    sys.meta_path[:] = before


def test_it_is_called_once_when_the_module_is_complete(
    write: Callable[[str], Path], calls: list[object]
) -> None:
    write("value = 1\nvalue = 2\n")
    before = [finder for finder in sys.meta_path if type(finder).__module__ != "_capd_after_import"]

    assert len(sys.meta_path) == len(before) + 1
    module = importlib.import_module(NAME)
    importlib.import_module(NAME)

    assert calls == [2]
    assert sys.meta_path == before
    importlib.reload(module)
    assert calls == [2]


def test_the_module_and_its_loader_look_as_ever(write: Callable[[str], Path], calls: list[object]) -> None:
    path = write("loader = __loader__\nvalue = 3\ndef function():\n    return 1\n")

    module = importlib.import_module(NAME)

    assert calls == [3]
    assert vars(module.__loader__) == {"name": NAME, "path": str(path)}
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.loader is module.__spec__.loader
    assert inspect.getsource(module.function) == "def function():\n    return 1\n"


def test_who_only_looks_for_the_module_changes_nothing(
    write: Callable[[str], Path], calls: list[object]
) -> None:
    write("value = 4\n")

    assert importlib.util.find_spec(NAME) is not None
    assert calls == []
    importlib.import_module(NAME)
    assert calls == [4]


def test_a_lazy_import_calls_when_the_module_is_used(
    write: Callable[[str], Path], calls: list[object]
) -> None:
    write("value = 5\n")
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)

    assert calls == []
    assert module.value == 5
    assert calls == [5]


def test_an_import_that_fails_raises_its_error_and_the_next_one_counts(
    write: Callable[[str], Path], calls: list[object]
) -> None:
    write("raise OSError('no device')\n")
    with pytest.raises(OSError, match="no device"):
        importlib.import_module(NAME)
    write("value = 60\n")

    importlib.import_module(NAME)

    assert calls == [60]


def test_what_the_function_raises_reaches_nobody(
    write: Callable[[str], Path], calls: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    from _capd_after_import import after_import

    write("value = 7\n")
    after_import(NAME, lambda: 1 / 0)

    importlib.import_module(NAME)

    assert calls == [7]
    assert capsys.readouterr() == ("", "")


def test_of_a_module_that_is_there_it_is_called_at_once() -> None:
    from _capd_after_import import after_import

    seen: list[str] = []
    before = list(sys.meta_path)

    after_import("json", lambda: seen.append("json"))

    assert seen == ["json"]
    assert sys.meta_path == before


def test_a_module_that_is_missing_is_missing_as_ever(calls: list[object]) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(NAME)

    assert caught.value.name == NAME
    assert calls == []
