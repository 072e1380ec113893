"""`capd verify`: what it prints, what it exits with, and what it refuses to touch."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from capd.server.runs.root_lock import RootLock
from capd.store.format.frames import FrameKind
from tests.kit.store.cli import Result
from tests.kit.store.damaging import flip, frames, inside

Capd = Callable[..., Result]
SERIES = "bf16/rank0/layer3/pre"


@pytest.fixture
def root(store_root: Path, tmp_path: Path) -> Path:
    """A copy of the store root with its two runs."""
    shutil.copytree(store_root, tmp_path / "captures")
    return tmp_path / "captures"


def a_shard(run: Path) -> Path:
    return min(path for path in run.rglob("data/c/**/*") if path.is_file())


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def everything(root: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in root.rglob("*")}


def test_a_sound_store_root_checks_all_its_runs_and_changes_nothing(capd: Capd, root: Path) -> None:
    before = everything(root)

    found = capd("verify", root)

    assert found.code == 0
    assert [line.split(":")[0] for line in found.out.splitlines()] == ["first.zarr", "second.zarr"]
    assert "second.zarr: sound; 5 series, 6 records" in found.out
    assert everything(root) == before


def test_the_json_document_has_the_documented_fields(capd: Capd, root: Path) -> None:
    found = capd("verify", root / "second.zarr", "--json")

    assert found.code == 0
    assert set(found.json) == {
        "ok", "runs", "series", "records", "error_records", "bytes", "damaged", "notes", "changed", "repaired",
        "moved_shards",
    }  # fmt: skip
    assert (found.json["ok"], found.json["records"], found.json["damaged"]) == (True, 6, [])


def test_damage_is_one_line_each_and_exit_code_4(capd: Capd, root: Path) -> None:
    path = a_shard(root / "second.zarr")
    spoil(path)

    text, data = capd("verify", root), capd("verify", root, "--json")

    assert (text.code, data.code) == (4, 4)
    [line] = [line for line in text.out.splitlines() if ".zarr" not in line.split(":")[0]]
    assert str(path.relative_to(root / "second.zarr")) in line
    [damage] = data.json["damaged"]
    assert set(damage) == {"run", "kind", "series", "records", "file", "offset", "what", "node"}
    assert damage["run"] == str(root / "second.zarr")
    assert damage["file"] == str(path.relative_to(root / "second.zarr"))


def test_repair_saves_the_rest_in_a_new_run_and_lists_what_is_lost(capd: Capd, root: Path) -> None:
    run = root / "second.zarr"
    flip(a_shard(run), inside(frames(a_shard(run), FrameKind.CHUNK)[0]))
    before = everything(run)

    text = capd("verify", run, "--repair", "-o", root / "new.zarr")
    data = capd("verify", run, "--repair", "-o", root / "newer.zarr", "--json")

    assert (text.code, data.code) == (4, 4)
    first, *lost, last = text.out.splitlines()
    assert first == f"second.zarr: 5 records saved in {root / 'new.zarr'}, 1 record lost; {run} is unchanged"
    assert last.startswith("new.zarr: sound; 4 series, 5 records")
    [repaired] = data.json["repaired"]
    assert (data.json["ok"], data.json["damaged"], data.json["runs"]) == (
        False,
        [],
        [str(root / "newer.zarr")],
    )
    assert (repaired["run"], repaired["new"], repaired["saved"]) == (str(run), str(root / "newer.zarr"), 5)
    [one] = repaired["lost"]
    assert (one["key"]["quant_type"], one["moment"]["iteration"]) == ("bf16", 3)
    assert lost == [f"{one['series']} record {one['record']}: " + lost[0].partition(": ")[2]]
    assert "iteration 3" in lost[0]
    assert everything(run) == before
    assert [one["records"] for one in capd("ls", root / "new.zarr", "--json").json] == [2, 1, 1, 1]


def test_repair_of_a_run_that_lost_nothing_exits_with_0(capd: Capd, root: Path) -> None:
    [catalog] = (root / "second.zarr").rglob("catalog.sqlite")
    catalog.unlink()

    found = capd("verify", root / "second.zarr", "--repair", "-o", root / "new.zarr")

    assert found.code == 0
    assert "6 records saved" in found.out
    assert "nothing lost" in found.out


def test_repair_needs_one_run_and_a_new_place(capd: Capd, root: Path) -> None:
    for options, why in (
        ((root, "--repair", "-o", root / "new.zarr"), "2 runs"),
        ((root / "second.zarr", "--repair"), "-o NEW"),
        ((root / "second.zarr", "-o", root / "new.zarr"), "-o NEW"),
        ((root / "second.zarr", "--repair", "-o", root / "first.zarr"), "exists already"),
        ((root / "second.zarr", "--repair", "-o", root / "second.zarr" / "x.zarr"), "is inside"),
    ):
        found = capd("verify", *options)
        assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)
        assert why in found.err
    assert not (root / "new.zarr").exists()


def test_the_catalog_is_made_anew(capd: Capd, root: Path) -> None:
    [catalog] = (root / "second.zarr").rglob("catalog.sqlite")
    catalog.unlink()
    assert capd("verify", root / "second.zarr").code == 4

    found = capd("verify", root / "second.zarr", "--rebuild-catalog")

    assert found.code == 0
    assert len(capd("ls", root / "second.zarr", "--json").json) == 5


@pytest.mark.parametrize("option", [["--repair", "-o"], ["--rebuild-catalog"], ["--adopt", "node0"]])
def test_nothing_is_changed_while_a_daemon_owns_the_node(capd: Capd, root: Path, option: list[str]) -> None:
    spoil(a_shard(root / "second.zarr"))
    lock = RootLock(root, "node0")
    before = everything(root / "second.zarr")
    try:
        new = [root / "new.zarr"] if option[-1] == "-o" else []
        found = capd("verify", root / "second.zarr", *option, *new)
    finally:
        lock.release()

    assert found.code == 7
    assert str(os.getpid()) in found.err
    assert everything(root / "second.zarr") == before


def test_a_node_can_be_adopted_and_an_unknown_one_is_named_with_the_known(capd: Capd, root: Path) -> None:
    assert capd("verify", root, "--adopt", "node0").code == 0

    unknown = capd("verify", root, "--adopt", "nodeX")

    assert unknown.code == 5
    assert "node0" in unknown.err


def foreign(path: Path) -> None:
    import zarr

    zarr.create_group(path)


def newer(path: Path) -> None:
    path.mkdir()
    capd = {"format": 99, "run_id": "x"}
    document = {"zarr_format": 3, "node_type": "group", "attributes": {"capd": capd}}
    (path / "zarr.json").write_text(json.dumps(document))


@pytest.mark.parametrize("option", [[], ["--repair", "-o", "new.zarr"], ["--rebuild-catalog"]])
@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.write_text("x"), foreign, newer])
def test_what_is_no_run_is_one_line_and_nothing_is_written(
    capd: Capd, tmp_path: Path, make: Callable[[Path], None], option: list[str]
) -> None:
    make(tmp_path / "x.zarr")
    before = everything(tmp_path)

    found = capd("verify", tmp_path / "x.zarr", *option)

    assert (found.code, found.out, found.err.count("\n")) == (1, "", 1)
    assert everything(tmp_path) == before


def test_a_directory_without_runs_and_contradicting_options_are_refused(capd: Capd, tmp_path: Path) -> None:
    assert capd("verify", tmp_path).code == 1
    assert capd("verify", tmp_path, "--rebuild-catalog", "--adopt", "n").code == 2


def test_a_store_that_cannot_be_written_is_one_line(
    capd: Capd, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def read_only(path: object, flags: int, *more: object, **options: object) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY) and str(path).startswith(str(root)):
            raise OSError(30, "Read-only file system")
        return real(path, flags, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", read_only)
    before = everything(root)

    rebuilt = capd("verify", root / "second.zarr", "--rebuild-catalog")
    repaired = capd("verify", root / "second.zarr", "--repair", "-o", root / "new.zarr")

    for found in (rebuilt, repaired):
        assert (found.code, found.err.count("\n")) == (1, 1)
        assert "Read-only file system" in found.err
    assert everything(root) == before


def test_progress_is_shown_on_a_terminal_only(root: Path) -> None:
    terminal, side = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "capd", "verify", str(root)], stdout=subprocess.PIPE, stderr=side
    ) as process:
        assert process.stdout is not None
        out = process.stdout.read()
        assert process.wait(60) == 0
    os.close(side)
    shown = os.read(terminal, 65536)
    os.close(terminal)

    assert b"\r" not in out
    assert b"second.zarr: 0 B checked" in shown
