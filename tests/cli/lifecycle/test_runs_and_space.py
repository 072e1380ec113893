"""`capd runs`, `du`, `tag` and `gc`: what there is, what it takes, and what can go."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import zarr

from tests.kit.store.cli import Result
from tests.kit.store.removing import age

Capd = Callable[..., Result]
Many = Callable[..., Path]


def test_runs_tells_when_state_steps_records_size_types_and_command(capd: Capd, many: Many) -> None:
    root = many(a=40, b=1)
    found = capd("runs", root, "--json").json

    assert [one["path"] for one in found] == [str(root / "a.zarr"), str(root / "b.zarr")]
    first = found[0]
    assert first["command"] == "python train.py --lr 1"
    assert (first["first_iteration"], first["last_iteration"], first["records"]) == (0, 2, 6)
    assert (first["state"], first["quant_types"], first["ranks"]) == ("sealed", ["mxfp8"], 1)
    assert first["started"] == 1e9
    assert first["size"] > first["stored_bytes"] > 0
    text = capd("runs", root)
    assert "0-2" in text.out
    assert "2 runs in" in text.err


def test_what_cannot_be_read_is_listed_with_its_problem(capd: Capd, many: Many) -> None:
    root = many(a=40, b=1)
    document = root / "a.zarr" / "zarr.json"
    document.write_text(document.read_text().replace('"format": 1', '"format": 7'))
    age(root / "a.zarr", 40)
    found = capd("runs", root, "--json").json

    assert [one["state"] for one in found] == ["unreadable", "sealed"]
    assert "upgrade capd" in found[0]["problem"]
    # It is never removed.
    assert capd("prune", root, "--keep-within", "2d", "--yes").code == 0
    assert document.exists()


def test_an_empty_directory_has_no_runs(capd: Capd, tmp_path: Path) -> None:
    assert capd("runs", tmp_path, "--json").json == []
    assert (capd("runs", tmp_path).code, capd("runs", tmp_path / "none").code) == (1, 1)
    assert "no run in" in capd("runs", tmp_path).err


def test_tags_stay_with_the_run_and_do_not_make_it_newer(capd: Capd, many: Many) -> None:
    root = many(a=40, b=1)
    assert capd("tag", root / "a.zarr", "paper", "x").out.split() == ["paper", "x"]
    assert capd("tag", root / "a.zarr", "x", "--remove", "--json").json["tags"] == ["paper"]
    assert capd("tag", root / "a.zarr").out.split() == ["paper"]

    assert [one["path"] for one in capd("runs", root, "--tag", "paper", "--json").json] == [
        str(root / "a.zarr")
    ]
    assert capd("runs", root, "--tag", "none").code == 5
    assert "b.zarr" in capd("ls", root).err
    assert dict(zarr.open_group(str(root / "a.zarr"), mode="r").attrs)["capd"]["tags"] == ["paper"]
    assert capd("verify", root / "a.zarr").code == 0
    assert capd("tag", root / "a.zarr", "a b").code == 2
    assert capd("tag", root, "x").code == 1


def test_du_counts_from_the_catalogs_and_the_check_from_the_disk(capd: Capd, many: Many) -> None:
    root = many(a=40, b=1)
    document = capd("du", root / "a.zarr", "--check", "--json").json
    [group] = document["groups"]
    run = root / "a.zarr"
    files = [path for path in run.rglob("*") if path.is_file()]

    assert (group["run"], group["series"], group["records"]) == ("a", 2, 6)
    assert group["raw_bytes"] == 6 * 16 * 16 * 4
    assert group["disk_files"] == len(files)
    assert group["disk_bytes"] == sum(path.stat().st_blocks * 512 for path in files)
    by_layer = capd("du", root / "a.zarr", "--by", "layer,tensor_name", "--json").json["groups"]
    assert [(one["layer"], one["tensor_name"], one["records"]) for one in by_layer] == [
        (0, "input", 3),
        (1, "input", 3),
    ]
    assert "stored" in capd("du", root).out
    assert (capd("du", root, "--by", "module").code, capd("du", root, "--by", "rank", "--check").code) == (
        2,
        2,
    )


def test_a_link_to_a_run_is_not_counted_again(capd: Capd, many: Many, one_run: Path) -> None:
    root = many(a=40, b=1)
    (root / "latest.zarr").symlink_to("b.zarr")
    (root / "apart.zarr").symlink_to(one_run)

    listed = capd("runs", root, "--json").json
    assert sorted(one["run"] for one in listed) == ["a", "apart", "b"]
    counted = capd("du", root, "--json").json["groups"]
    assert sorted(one["run"] for one in counted) == ["a", "apart", "b"]


def test_gc_frees_quarantine_leftovers_and_the_trash_after_seven_days(capd: Capd, many: Many) -> None:
    root = many(a=40, b=20, c=1)
    node = root / "a.zarr" / ".capd" / "node=node0"
    (node / "quarantine").mkdir()
    (node / "quarantine" / "bad.partial").write_bytes(bytes(10_000))
    (node / "spool" / "document-0.tmp").write_bytes(bytes(5000))
    (node / "spool" / "dead.partial").write_bytes(b"records that nobody sealed")
    assert capd("rm", root / "b.zarr", "--yes").code == 0
    assert capd("rm", root / "c.zarr", "--yes").code == 0
    [old] = root.glob(".capd/trash/*/b.zarr")
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() - 8 * 86_400))
    old.parent.rename(old.parent.with_name(f"{stamp}-1"))

    dry = capd("gc", root, "--json").json
    assert [(one["what"], one["due"]) for one in dry["found"]] == [
        ("removed run", True), ("removed run", False), ("quarantine", True), ("leftover", True),
    ]  # fmt: skip
    assert (node / "quarantine").exists()
    reclaimable = capd("du", root / "a.zarr", "--json").json["groups"][0]["reclaimable_bytes"]
    assert reclaimable >= 15_000

    done = capd("gc", root, "--yes", "--json").json
    assert done["freed_bytes"] >= 15_000
    assert not (node / "quarantine").exists()
    assert [path.name for path in (node / "spool").iterdir()] == ["dead.partial"]
    assert [path.name for path in root.glob(".capd/trash/*/*")] == ["c.zarr"]
    assert capd("gc", root, "--all", "--yes").code == 0
    assert list(root.glob(".capd/trash/*")) == []
    assert "removed on" in capd("ls", root / "c.zarr").err


def test_the_commands_import_neither_torch_nor_zarr(many: Many) -> None:
    root = many(a=40, b=1)
    script = f"""
import sys
from capd.cli.app import main
for words in (["runs"], ["du"], ["prune", "--keep-last", "1", "--yes"], ["gc", "--yes"]):
    try:
        main([words[0], {str(root)!r}, *words[1:]])
    except SystemExit as end:
        assert not end.code, (words, end.code)
print(sorted({{"torch", "zarr", "matplotlib"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
