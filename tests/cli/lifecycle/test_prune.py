"""`capd prune`: the table with reasons, the rules, and what it never removes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.jobs.terminal import Terminal
from tests.kit.store.cli import Result
from tests.kit.store.removing import files_below, small_run

Capd = Callable[..., Result]
Many = Callable[..., Path]


def names(root: Path) -> str:
    return "".join(sorted(path.stem for path in root.glob("*.zarr")))


def test_without_yes_each_run_has_its_reason_and_nothing_changes(capd: Capd, many: Many) -> None:
    root = many(a=40, b=20, c=1)
    assert capd("tag", root / "a.zarr", "paper").code == 0
    before = files_below(root)
    found = capd("prune", root, "--keep-last", "1", "--keep-tag", "paper")

    assert found.code == 0
    rows = [line.split(maxsplit=2) for line in found.out.splitlines()[1:]]
    assert [row[:2] for row in rows] == [["keep", "a"], ["remove", "b"], ["keep", "c"]]
    ends = ("tag paper", "no rule keeps it", "one of the last 1")
    assert all(row[2].rstrip().endswith(end) for row, end in zip(rows, ends, strict=True))
    assert "nothing removed; --yes removes 1 run" in found.err
    assert files_below(root) == before


@pytest.mark.parametrize(
    ("rules", "stays"),
    [
        (("--keep-last", "2"), "bc"),
        (("--keep-within", "30d"), "bc"),
        (("--keep-within", "1w", "--keep-tag", "paper"), "ac"),
        (("--max-size", "1TB"), "abc"),
    ],
)
def test_with_yes_the_rest_goes_to_the_trash(
    rules: tuple[str, ...], stays: str, capd: Capd, many: Many
) -> None:
    root = many(a=40, b=20, c=1)
    assert capd("tag", root / "a.zarr", "paper").code == 0
    done = capd("prune", root, *rules, "--yes", "--json")

    assert done.code == 0
    assert names(root) == stays
    assert {one["run"] for one in done.json["runs"] if one["keep"]} == set(stays)
    trashed = {path.name[0] for path in root.glob(".capd/trash/*/*.zarr")}
    assert trashed == set("abc") - set(stays)


def test_the_size_limit_takes_the_oldest(capd: Capd, many: Many) -> None:
    root = many(a=40, b=20, c=1)
    size = capd("runs", root, "--json").json[0]["size"]

    assert capd("prune", root, "--max-size", str(2 * size), "--yes").code == 0
    assert names(root) == "bc"
    full = capd("prune", root, "--keep-last", "2", "--max-size", str(size), "--yes")
    assert (full.code, names(root)) == (6, "bc")
    assert "more than --max-size" in full.err


def test_a_plan_that_waits_for_an_answer_is_made_again(capd: Capd, many: Many) -> None:
    root = many(a=40, b=20, c=1, d=0.5)
    with Terminal("prune", root, "--keep-last", "1", "--keep-tag", "paper") as terminal:
        terminal.until(lambda lines: "to remove:" in "".join(lines))
        assert capd("tag", root / "a.zarr", "paper").code == 0
        assert capd("rm", root / "b.zarr", "--yes").code == 0
        terminal.type("3\n")
        shown = terminal.read_all()
        assert terminal.process.wait(60) == 1
    assert names(root) == "ad"
    assert "a.zarr stays: it changed after the plan was made, and a rule keeps it now" in shown
    assert "1 run moved to the trash" in shown


def test_pinned_runs_stay(capd: Capd, many: Many) -> None:
    root = many(a=40, b=20, c=1)
    assert capd("pin", root / "a.zarr").code == 0
    assert capd("prune", root, "--keep-last", "1", "--yes").code == 0
    assert names(root) == "ac"
    assert capd("unpin", root / "a.zarr").code == 0
    assert capd("prune", root, "--keep-last", "1", "--yes").code == 0
    assert names(root) == "c"


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ((), "no rule says what to keep"),
        (("--keep-within", "1s"), "keep none of the 2 runs"),
        (("--keep-tag", "none"), "keep none of the 2 runs"),
        (("--max-size", "1"), "keep none of the 2 runs"),
        (("--keep-within", "soon"), "--keep-within: 'soon' is not an age"),
        (("--max-size", "2G"), "--max-size: '2G' is not a size"),
    ],
)
def test_rules_that_keep_nothing_or_cannot_be_read_are_refused(
    rules: tuple[str, ...], says: str, capd: Capd, many: Many, tmp_path: Path
) -> None:
    root = many(a=40, b=20)
    found = capd("prune", root, *rules, "--yes", cwd=tmp_path)

    assert (found.code, found.out) == (2, "")
    assert says in found.err
    assert len(found.err.splitlines()) == 1
    assert names(root) == "ab"


def test_without_rules_those_of_the_configuration_hold_and_the_newest_stays(
    capd: Capd, many: Many, tmp_path: Path
) -> None:
    root = many(a=40, b=20, c=10)
    (tmp_path / "capd.toml").write_text('[retention]\nkeep_within = "1h"\n')

    assert capd("prune", root, "--yes", cwd=tmp_path).code == 0
    assert names(root) == "c"


def test_what_is_no_run_is_not_looked_at(capd: Capd, many: Many) -> None:
    root = many(a=40, b=20)
    small_run(root, "e", steps=0)
    (root / "data").mkdir()
    (root / "data" / "x").write_text("mine")
    (root / "notes.zarr").mkdir()
    (root / "notes.zarr" / "zarr.json").write_text(
        '{"zarr_format": 3, "node_type": "group", "attributes": {}}'
    )
    (root / "link.zarr").symlink_to(root / "b.zarr")

    emptied = capd("prune", root, "--keep-tag", "misspelt", "--yes")
    assert (emptied.code, names(root)) == (2, "abelinknotes"), emptied.err
    assert "keep none of the 2 runs" in emptied.err

    # Neither the link nor the foreign group is the last run, nor is one without records.
    assert capd("prune", root, "--keep-last", "1", "--yes").code == 0
    assert names(root) == "belinknotes"
    assert (root / "data" / "x").read_text() == "mine"
    assert (root / "link.zarr").is_symlink()


@pytest.mark.parametrize("name", ["a.zarr", "nowhere"])
def test_what_is_no_directory_of_runs_is_refused(name: str, capd: Capd, many: Many) -> None:
    root = many(a=1)
    found = capd("prune", root / name, "--keep-last", "1", "--yes")
    assert found.code in (1, 2)
    assert len(found.err.splitlines()) == 1
    assert names(root) == "a"
