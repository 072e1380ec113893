"""The catalog rebuilt from frames equals the one it replaces, and what a dead node left is taken over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from capd.errors import NothingMatched
from capd.store.catalog.rows import CATALOG_NAME, SessionRow
from capd.store.repair import catalog
from capd.store.repair.catalog import rebuild_catalog, take_over
from capd.store.verify.run import verify_run
from tests.kit.store.content import tables
from tests.kit.store.damaging import edit_catalog, image
from tests.kit.store.repairing import Made, is_whole, put_all
from tests.kit.store.writing import Writer, key

RNG = np.random.default_rng(13)


def test_the_catalog_rebuilt_from_frames_equals_the_one_it_replaces(tmp_path: Path) -> None:
    """Large, small, ragged, variants, empty, repeated, several clients and restarts, sealed and continued, sessions."""
    for attempt in range(2):
        writer = Writer(tmp_path, shard_nbytes=1 << 20)
        writer.sequence = attempt * 1000
        for iteration in range(4):
            moment = {"iteration": iteration, "attempt": attempt}
            put = writer.put
            put(key("large"), "float32", RNG.standard_normal((300, 400)).astype("f4"), **moment)
            put(key("same"), "float32", np.ones((300, 400), "f4"), **moment)
            for rows in (3, 0, 700, 90):
                bits = RNG.integers(0, 60_000, (rows, 500), dtype="u2")
                put(key("ragged"), "bfloat16", bits, call=rows, **moment)
            bits = RNG.integers(0, 256, (40, 40), dtype="u1")
            put(key("scale"), "float8_e8m0fnu", bits, **moment)
            put(key("odd"), "float32", np.array([np.nan, np.inf, -0.0, 1e-42], "f4"), **moment)
            put(key("big"), "int64", np.array([2**63 - 1, -(2**63)], "i8"), **moment)
            for call in range(30):
                put(key("small"), "float32", RNG.standard_normal((100, 8)).astype("f4"), call=call, **moment)
        writer.flush()
        if attempt:
            session = SessionRow(b"0123456789abcdef", 0, 1, "h", 1, 2, 3, "ended", 400, 400, 0, {}, [])
            writer.pipeline.save_session("run", session).result(timeout=30)
        writer.close()
    before = tables(writer.run)
    assert {name: bool(rows) for name, rows in before.items()} == dict.fromkeys(before, True)
    assert len(before["records"]) == 2 * 4 * 39

    rebuild_catalog(writer.run, "n0")

    assert tables(writer.run) == before
    assert verify_run(writer.run).ok
    node = writer.run / ".capd" / "node=n0"
    assert [path.name for path in node.glob("catalog*")] == [CATALOG_NAME]


@pytest.mark.parametrize("step", ["readable_rows", "open_node"])
def test_an_interrupted_rebuild_leaves_a_catalog_that_the_next_start_completes(
    run: Path, made: Made, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(catalog, step, _stopping(getattr(catalog, step), [0]))
        with pytest.raises(_Stopped):
            rebuild_catalog(run, "n0")

    Writer(run.parent).close()

    is_whole(run, made[1])


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM series",
        "UPDATE records SET body=changed(body, 'moment.iteration', '9')",
        "UPDATE records SET attempt=9",
        "UPDATE records SET body=x'93'",
        "UPDATE series SET records=1",
        "DELETE FROM acked",
    ],
)
def test_a_catalog_that_contradicts_the_frames_is_built_again(run: Path, made: Made, statement: str) -> None:
    edit_catalog(run / ".capd" / "node=n0" / CATALOG_NAME, statement)
    assert not verify_run(run).ok

    rebuild_catalog(run, "n0")

    is_whole(run, made[1])


class _Stopped(BaseException):
    """The process ends here."""


def _stopping(real: Callable[..., object], left: list[int]) -> Callable[..., object]:
    def call(*arguments: object, **options: object) -> object:
        if left[0] == 0:
            raise _Stopped
        left[0] -= 1
        return real(*arguments, **options)

    return call


def test_taking_over_seals_what_a_dead_node_left(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a", node="n7")
    put_all(writer, 2)
    writer.flush()
    run = image(writer, tmp_path / "b")
    writer.close()

    with pytest.raises(NothingMatched, match="n7"):
        take_over(run, "n8")
    take_over(run, "n7")

    is_whole(run, writer.held)
    assert not list((run / ".capd" / "node=n7" / "spool").iterdir())
