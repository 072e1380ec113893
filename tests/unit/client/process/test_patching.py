"""A function that several replace at once is put back whoever leaves first."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from capd_client.process.patching import patch


def saying(word: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    return lambda function: lambda: f"{word} {function()}"


def original() -> str:
    return "original"


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_whoever_leaves_the_others_stay(order: tuple[int, ...]) -> None:
    holder: Any = SimpleNamespace(call=original)
    undo = [patch(holder, "call", saying(str(number))) for number in range(3)]
    here = {0, 1, 2}

    for number in order:
        undo[number]()
        here.discard(number)
        assert set(holder.call().split()) == {"original", *map(str, here)}

    assert holder.call is original


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_an_innermost_one_is_below_those_that_came_before_and_stays_there(order: tuple[int, ...]) -> None:
    holder: Any = SimpleNamespace(call=original)
    undo = [patch(holder, "call", saying(str(number)), innermost=number == 2) for number in range(3)]
    words = ["1", "0", "2", "original"]
    assert holder.call().split() == words

    for number in order:
        undo[number]()
        words.remove(str(number))
        assert holder.call().split() == words
    assert holder.call is original


def test_an_inherited_method_is_inherited_again() -> None:
    class Base:
        def call(self) -> str:
            return "base"

    class Derived(Base):
        pass

    undo = patch(Derived, "call", lambda function: lambda self: f"our {function(self)}")
    assert Derived().call() == "our base"
    undo()

    assert Derived().call() == "base"
    assert "call" not in vars(Derived)


def test_what_the_job_patched_after_us_is_left_alone() -> None:
    holder: Any = SimpleNamespace(call=original)
    undo = patch(holder, "call", saying("ours"))
    below = holder.call
    holder.call = lambda: f"theirs {below()}"
    theirs = holder.call

    undo()

    assert holder.call is theirs


def test_one_wrapper_is_put_on_once_and_stays_for_its_last_user() -> None:
    holder: Any = SimpleNamespace(call=original)
    ours, other = saying("ours"), saying("other")
    first, _, second = patch(holder, "call", ours), patch(holder, "call", other), patch(holder, "call", ours)
    assert holder.call() == "other ours original"

    first()
    assert holder.call() == "other ours original"
    second()
    assert holder.call() == "other original"
