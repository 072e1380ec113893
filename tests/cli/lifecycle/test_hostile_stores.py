"""Stores that are not as capd left them: links, mounts, forged words, a full disk."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.jobs.terminal import Terminal
from tests.kit.store.cli import Result
from tests.kit.store.removing import age, files_below

Capd = Callable[..., Result]
Many = Callable[..., Path]
_IN_NAMESPACE = ["unshare", "--mount", "sh", "-ec"]


def in_mounts(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script with mounts of its own. Skips the test where none can be made."""
    probe = 'd=$(mktemp -d); mount -t tmpfs -o size=64k none "$d"; umount "$d"; rmdir "$d"'
    if shutil.which("unshare") is None or subprocess.run([*_IN_NAMESPACE, probe], check=False).returncode:
        pytest.skip("no mount can be made here")
    return subprocess.run([*_IN_NAMESPACE, script], capture_output=True, text=True, check=False, timeout=120)


def words(*given: str | Path) -> str:
    return shlex.join([sys.executable, "-m", "capd", *map(str, given)])


def test_a_run_with_a_mount_inside_is_refused(many: Many) -> None:
    root = many(a=40, b=1)
    inside = shlex.quote(str(root / "a.zarr" / "mxfp8"))
    before = files_below(root)
    done = in_mounts(f"mount --bind {inside} {inside}; {words('rm', root / 'a.zarr', '--yes')}")

    assert (done.returncode, done.stdout) == (1, "")
    assert "is a mount inside the run, nothing removed; unmount it first" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert files_below(root) == before


@pytest.mark.slow
def test_a_full_disk_frees_the_trash_first(many: Many, tmp_path: Path) -> None:
    source, disk = many(a=40, b=20, c=1), tmp_path / "disk"
    disk.mkdir()
    done = in_mounts(
        f"mount -t tmpfs -o size=1m none {disk}; cp -a {source}/*.zarr {disk}\n"
        f"{words('rm', disk / 'a.zarr', '--yes')}\n"
        f"dd if=/dev/zero of={disk}/fill bs=4k 2>/dev/null || true\n"
        f"{words('prune', disk, '--keep-last', '1', '--yes')} && exit 9; test $? = 6\n"
        f"{words('rm', disk / 'a.zarr', '--restore')} && exit 9; test $? = 6\n"
        f"test -f {disk}/b.zarr/zarr.json; test ! -e {disk}/b.zarr/.capd/document.tmp\n"
        f"{words('gc', disk, '--all', '--yes')}; {words('prune', disk, '--keep-last', '1', '--yes')}\n"
        f"ls {disk}"
    )
    assert done.returncode == 0, done.stderr
    assert "the disk is full, and some KiB must be written first; free the trash" in done.stderr
    assert "must be written first; delete another file" in done.stderr
    assert done.stdout.splitlines()[-2:] == ["c.zarr", "fill"]


def test_gc_follows_no_link(capd: Capd, many: Many, tmp_path: Path) -> None:
    root, other = many(a=40, b=1), tmp_path / "other"
    for place in (other / "quarantine", other / "spool"):
        place.mkdir(parents=True)
        (place / "x.tmp").write_text("mine")
    nodes = root / "a.zarr" / ".capd"
    (nodes / "node=link").symlink_to(other)
    (nodes / "node=half").mkdir()
    for name in ("quarantine", "spool"):
        (nodes / "node=half" / name).symlink_to(other / name)
    (root / "b.zarr" / ".capd").rename(tmp_path / "apart")
    (root / "b.zarr" / ".capd").symlink_to(tmp_path / "apart")
    (tmp_path / "apart" / "node=node0" / "quarantine").mkdir()

    assert capd("gc", root, "--yes", "--json").json["found"] == []
    assert [path.name for path in sorted(other.rglob("*.tmp"))] == ["x.tmp", "x.tmp"]
    assert (tmp_path / "apart" / "node=node0" / "quarantine").is_dir()


@pytest.mark.slow
def test_series_behind_a_link_are_refused(capd: Capd, many: Many) -> None:
    root = many(a=40, b=1)
    run = root / "a.zarr"
    shutil.rmtree(run / "mxfp8")
    (run / "mxfp8").symlink_to(root / "b.zarr" / "mxfp8")
    before = files_below(root / "b.zarr")
    found = capd("rm", run, "--series", "*.input", "--yes")

    assert (found.code, len(found.err.splitlines())) == (1, 1), found.err
    assert "is reached by a symbolic link, nothing removed" in found.err
    assert files_below(root / "b.zarr") == before


def test_forged_words_never_reach_the_terminal_raw(capd: Capd, many: Many) -> None:
    root = many(a=40)
    path = root / "a.zarr" / "zarr.json"
    document = json.loads(path.read_text())
    document["attributes"]["capd"]["tags"] = ["\x1b[2J", "\ud800"]
    path.write_text(json.dumps(document))

    for command in (("tag", root / "a.zarr"), ("runs", root), ("prune", root, "--keep-last", "1")):
        found = capd(*command)
        assert found.code == 0
        assert "\x1b" not in found.out + found.err


def test_a_restore_of_a_foreign_directory_leaves_nothing_in_it(capd: Capd, many: Many) -> None:
    root = many(a=1)
    foreign = root / "thesis.zarr"
    foreign.mkdir()
    found = capd("rm", foreign, "--restore")
    assert (found.code, "is there already" in found.err) == (1, True)
    assert list(foreign.iterdir()) == []


def test_what_is_in_the_trash_is_no_place_for_commands(capd: Capd, many: Many) -> None:
    root = many(a=1, b=1)
    assert capd("rm", root / "a.zarr", "--yes").code == 0
    [entry] = root.glob(".capd/trash/*")
    for command in (("rm", entry / "a.zarr"), ("prune", entry, "--keep-last", "1"), ("gc", entry)):
        found = capd(*command, "--yes")
        assert (found.code, len(found.err.splitlines())) == (2, 1)
        assert "is in the trash; name the directory of runs" in found.err
    assert [path.name for path in entry.iterdir()] == ["a.zarr"]


@pytest.mark.slow
def test_one_run_named_twice_is_removed_once(capd: Capd, many: Many) -> None:
    root = many(a=1, b=1)
    done = capd("rm", "a.zarr", root / "a.zarr", "--yes", "--json", cwd=root)
    assert (done.code, [one["run"] for one in done.json["removed"]]) == (0, ["a"])


@pytest.fixture
def asked(many: Many) -> Iterator[Callable[..., str]]:
    root = many(a=40, b=1)

    def ask(*given: str) -> str:
        with Terminal("rm", root / "a.zarr", *given) as terminal:
            terminal.type("no\n")
            shown: str = terminal.read_all()
            assert terminal.process.wait(60) == 0
        return shown

    yield ask
    assert (root / "a.zarr" / "mxfp8").is_dir()


def test_a_terminal_is_asked_for_the_number_of_series(asked: Callable[..., str]) -> None:
    assert "type the number of series (2) to remove" in asked("--series", "*.input")


@pytest.mark.slow
def test_a_directory_that_cannot_be_written_is_told_in_one_line(many: Many) -> None:
    root = many(a=40, b=1)
    place = shlex.quote(str(root))
    done = in_mounts(
        f"mount --bind {place} {place}; mount -o remount,ro,bind {place}\n"
        f"for command in {shlex.quote(words('rm', root / 'a.zarr', '--yes'))} "
        f"{shlex.quote(words('gc', root, '--yes'))} {shlex.quote(words('tag', root / 'a.zarr', 'x'))}; do\n"
        'sh -c "$command" >/dev/null && exit 9; test $? = 1\ndone'
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all("Read-only file system; this user must be able to write" in line for line in lines)
    assert (root / "a.zarr" / "zarr.json").exists()


@pytest.mark.slow
def test_a_time_in_the_future_keeps_a_run(capd: Capd, many: Many) -> None:
    root = many(a=40, b=20)
    age(root / "a.zarr", -400)
    done = capd("prune", root, "--keep-within", "1d", "--yes", "--json")
    assert (done.code, [(one["run"], one["keep"]) for one in done.json["runs"]]) == (
        0,
        [("b", False), ("a", True)],
    )
