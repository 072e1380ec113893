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

from capd.server.instance import RootLock
from tests.cli.conftest import Result

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
    assert set(found.json) == {"ok", "runs", "series", "records", "bytes", "damaged", "notes", "repaired"}
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


def test_repair_says_what_was_lost_and_leaves_a_sound_run(capd: Capd, root: Path) -> None:
    spoil(a_shard(root / "second.zarr"))

    found = capd("verify", root / "second.zarr", "--repair")

    assert found.code == 0
    assert "the old version is in" in found.out
    assert "second.zarr: sound" in found.out
    again = capd("verify", root / "second.zarr", "--repair", "--json")
    assert (again.code, again.json["repaired"][0]["rebuilt"]) == (0, [])


def test_the_catalog_is_made_anew(capd: Capd, root: Path) -> None:
    [catalog] = (root / "second.zarr").rglob("catalog.sqlite")
    catalog.unlink()
    assert capd("verify", root / "second.zarr").code == 4

    found = capd("verify", root / "second.zarr", "--rebuild-catalog")

    assert found.code == 0
    assert len(capd("ls", root / "second.zarr", "--json").json) == 5


@pytest.mark.parametrize("option", [["--repair"], ["--rebuild-catalog"], ["--adopt", "node0"]])
def test_nothing_is_changed_while_a_daemon_owns_the_node(capd: Capd, root: Path, option: list[str]) -> None:
    spoil(a_shard(root / "second.zarr"))
    lock = RootLock(root, "node0")
    before = everything(root / "second.zarr")
    try:
        found = capd("verify", root / "second.zarr", *option)
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


@pytest.mark.parametrize("option", [[], ["--repair"], ["--rebuild-catalog"]])
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
    assert capd("verify", tmp_path, "--repair", "--adopt", "n").code == 2


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

    found = capd("verify", root / "second.zarr", "--repair")

    assert (found.code, found.err.count("\n")) == (1, 1)
    assert "Read-only file system" in found.err
    assert everything(root) == before


def test_progress_is_shown_on_a_terminal_only(root: Path) -> None:
    program = (
        "import sys\nfrom capd.cli import verify\nverify._STEP_NBYTES = 1\n"
        "from capd.cli.app import main\nmain(['verify', sys.argv[1]])"
    )
    terminal, side = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE, stderr=side
    ) as process:
        assert process.stdout is not None
        out = process.stdout.read()
        assert process.wait(60) == 0
    os.close(side)
    shown = os.read(terminal, 65536)
    os.close(terminal)

    assert b"\r" not in out
    assert b"\rsecond.zarr: " in shown
