"""Divides the rows of a table of tests between the default tier and the slow one, and says which are wanted."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import pytest

__all__ = ["rows", "rows_wanted"]


def rows(table: Iterable[Hashable], quick: Iterable[Hashable]) -> list[Any]:
    """Returns the rows of `parametrize`: all of `table`, of which those that are not `quick` have the mark slow.

    A tuple has one value for each argument, so a tuple that is the value of one argument stands in a tuple.
    """
    in_default = frozenset(quick)
    return [_row(row, slow=row not in in_default) for row in table]


def _row(row: Hashable, *, slow: bool) -> Any:
    values = row if isinstance(row, tuple) else (row,)
    return pytest.param(*values, marks=[pytest.mark.slow] if slow else [])


def rows_wanted(request: pytest.FixtureRequest, argument: str, always: Iterable[str] = ()) -> set[str]:
    """Returns the rows that the chosen tests of a file need, for a fixture whose one job runs them all.

    Args:
        request: Of the fixture; its scope is the module or larger.
        argument: The name of the argument that has the name of the row.
        always: Rows that tests without this argument need.
    """
    here = (item for item in request.session.items if item.path == request.path)
    return {*always, *(item.callspec.params[argument] for item in here if _has(item, argument))}  # type: ignore[attr-defined]


def _has(item: pytest.Item, argument: str) -> bool:
    return argument in getattr(getattr(item, "callspec", None), "params", ())
