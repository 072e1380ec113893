"""The words that a shell offers at TAB: runs, series, and the values of their fields, from the catalogs of a run.

A shell waits for these words, and shows in the middle of its line what is printed. So nothing here imports torch, zarr,
numpy or pydantic, nothing is printed, and an error only means that there are no words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import typer

__all__ = [
    "any_of", "any_where", "field_lists", "format_lists", "lists_of", "pairs_between", "recipe_lists", "run_names",
    "run_words",
    "series_paths", "store_paths", "store_roots", "tag_words", "values_of",
]  # fmt: skip

Complete = Callable[[typer.Context, str], list[str]]
Find = Callable[[typer.Context, str], Iterable[str]]
# Shells would quote other characters, each in its own way, and zsh evaluates what it is given.
_PLAIN = re.compile(r"[\w.,:=/#*+@%-]+")
_MOST = 1000
# As `capd_client.protocol.scalars.scalar_key`, which takes the time to import msgspec.
_SCALARS = "(quant_type = 'scalar' AND layer_type = 'scalar' AND operation = 'step')"
# As `capd.store.catalog.rows.NO_ERRORS`, for the same reason.
_TENSORS = f"NOT {_SCALARS} AND dtype NOT LIKE 'errors:%'"


def _offered(find: Find) -> Complete:
    """Return the completion that offers the plain words which begin with what was typed."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        try:
            return [
                word
                for word in find(ctx, incomplete)
                if word.startswith(incomplete) and _PLAIN.fullmatch(word)
            ]
        except Exception:
            return []

    return complete


def any_of(*words: str) -> Complete:
    """Complete one of these words."""
    return _offered(lambda _ctx, _incomplete: words)


def any_where(field: str, value: str, words: Iterable[str], others: Iterable[str]) -> Complete:
    """Complete one of these words where an argument has this value, one of the others elsewhere."""
    # After an option that still lacks its value, the argument is no parameter yet.
    return _offered(lambda ctx, _incomplete: words if value in (ctx.params.get(field), *ctx.args) else others)


def lists_of(*words: str) -> Complete:
    """Complete these words with commas between them."""
    return _offered(lambda _ctx, incomplete: _listed(incomplete, words))


def values_of(field: str) -> Complete:
    """Complete a value, or values with commas between them, that the series of the run have in a field of their key."""
    return _offered(lambda ctx, incomplete: _listed(incomplete, _values(ctx, field)))


@_offered
def format_lists(_ctx: typer.Context, incomplete: str) -> Iterable[str]:
    """Complete number formats with commas between them."""
    from capd_client.formats.spec import FORMATS

    return _listed(incomplete, FORMATS)


@_offered
def recipe_lists(_ctx: typer.Context, incomplete: str) -> Iterable[str]:
    """Complete recipes with commas between them."""
    from capd_client.formats.spec import FORMATS
    from capd_client.recipes.presets import PRESETS

    return _listed(incomplete, ("none", *PRESETS, *FORMATS))


@_offered
def field_lists(_ctx: typer.Context, incomplete: str) -> Iterable[str]:
    """Complete fields of a key or a moment with commas between them."""
    from capd_client.protocol.key import Key, Moment

    # All but the time and the recomputation.
    return _listed(incomplete, (*Key.__struct_fields__, *Moment.__struct_fields__[:-2]))


@_offered
def pairs_between(ctx: typer.Context, incomplete: str) -> Iterable[str]:
    """Complete FIELD=A,B: the fields of a key, then values that the run has."""
    from capd_client.protocol.key import Key

    field, equals, typed = incomplete.partition("=")
    if not equals:
        return [f"{name}=" for name in Key.__struct_fields__]
    values = _values(ctx, field) if field in Key.__struct_fields__ else ()
    return [f"{field}={words}" for words in _listed(typed, values)]


def _listed(typed: str, words: Iterable[str]) -> Iterator[str]:
    before, comma, _ = typed.rpartition(",")
    taken = before.split(",")
    return (f"{before}{comma}{word}" for word in words if word not in taken)


@_offered
def store_paths(_ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """Complete the path of a run, or of a directory with runs. The default store's runs are offered first."""
    head = incomplete.rpartition("/")[0] + "/" if "/" in incomplete else ""
    if not incomplete:
        yield from (str(run) for run in _runs(_default_store())[::-1])
    for place in sorted(Path(head or ".").iterdir()):
        if place.suffix == ".zarr":
            yield f"{head}{place.name}"
        elif place.is_dir() and (runs := _runs(place)):
            yield f"{head}{place.name}"
            yield from (f"{head}{place.name}/{run.name}" for run in runs)


@_offered
def store_roots(_ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """Complete the path of a directory with runs."""
    head = incomplete.rpartition("/")[0] + "/" if "/" in incomplete else ""
    for place in sorted(Path(head or ".").iterdir()):
        if place.suffix != ".zarr" and place.is_dir() and _runs(place):
            yield f"{head}{place.name}"


@_offered
def run_words(_ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """Complete a run: its name in the default store, the newest first, or its path."""
    if "/" not in incomplete:
        yield from (run.stem for run in _runs(_default_store())[::-1])
    yield from store_paths(_ctx, incomplete)


@_offered
def tag_words(_ctx: typer.Context, _incomplete: str) -> Iterator[str]:
    """Complete a tag that a run of the default store has."""
    from capd.lifecycle.marks import tags_of

    seen: set[str] = set()
    for run in _runs(_default_store()):
        with suppress(Exception):
            seen.update(tags_of(run))
    yield from sorted(seen)


@_offered
def run_names(ctx: typer.Context, _incomplete: str) -> list[str]:
    """Complete the name of a run in STORE, the newest first."""
    return [run.stem for run in _runs(_place(ctx))[::-1]]


@_offered
def series_paths(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """Complete the path of a series of the run, or the name of a scalar."""
    yield from _column(ctx, "path", incomplete, _TENSORS)
    yield from _column(ctx, "tensor_name", incomplete, _SCALARS)


def _values(ctx: typer.Context, field: str) -> list[str]:
    of = _SCALARS if ctx.params.get("scalars") else _TENSORS
    found = {int(word) if word.isdigit() else word for word in _column(ctx, field, "", of)}
    return [str(value) for value in sorted(found, key=lambda value: (isinstance(value, str), value))]


def _column(ctx: typer.Context, column: str, start: str, of: str) -> Iterator[str]:
    """Yield the different texts that a column of the run's catalogs has, if they begin with `start`.

    Args:
        ctx: Has the run.
        column: The column.
        start: The beginning of the texts.
        of: The series, _TENSORS or _SCALARS.
    """
    from capd.store.catalog.opening import connect_read_only

    # `column` and `of` are ours, no texts of a user.
    query = f"SELECT DISTINCT {column} FROM series WHERE substr({column}, 1, ?) = ? AND {of} LIMIT {_MOST}"  # noqa: S608
    for catalog in _run(ctx).glob(".capd/node=*/catalog.sqlite"):
        with closing(connect_read_only(catalog)) as db:
            yield from (str(value) for (value,) in db.execute(query, (len(start), start)) if value != "")


def _run(ctx: typer.Context) -> Path:
    """Return the run that the command would read."""
    place = _place(ctx)
    name: Any = ctx.params.get("run")
    if place.suffix == ".zarr":
        return place
    return place / f"{name.removesuffix('.zarr')}.zarr" if name else _runs(place)[-1]


def _place(ctx: typer.Context) -> Path:
    """Return STORE, or the default store. After an option that still lacks its value, STORE is no parameter yet."""
    runs: Any = ctx.params.get("runs") or ctx.args
    store = ctx.params.get("store") or ctx.params.get("source")
    given = Path(store or next(iter(runs), None) or _default_store())
    # A command about runs also takes the name of one in the default store.
    named = _default_store() / f"{given}.zarr"
    return named if len(given.parts) == 1 and not given.exists() and named.is_dir() else given


def _runs(root: Path) -> list[Path]:
    """Return the runs of a directory, the newest last."""
    return [
        path.parent
        for path in sorted(root.glob("*.zarr/zarr.json"), key=lambda path: path.stat().st_mtime_ns)
    ]


def _default_store() -> Path:
    """Return the directory of runs if none is named. Only a capd.toml takes the time to import all settings."""
    if os.environ.get("CAPD_CONFIG") or os.path.exists("capd.toml"):
        from capd.config import load_daemon_settings

        return load_daemon_settings({}).store
    return Path(os.environ.get("CAPD_STORE") or "captures")
