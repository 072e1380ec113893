"""What is no store that this capd can use is refused in one line that says what to do, and nothing is written."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr

import capd as capd_package
from capd.errors import StoreError
from capd.store.catalog.rows import CATALOG_NAME
from capd_client.protocol.key import Moment
from capd_client.protocol.messages import Reject
from tests.kit.daemon import DaemonProcess, Rank, daemons
from tests.kit.store.cli import Result, StoreWriter, linear_key, run_capd

Capd = Callable[..., Result]
NODE = ".capd/node=node0"


def sound_run(root: Path) -> Path:
    """A sealed run `run` of two records, one large and one small."""
    writer = StoreWriter(root)
    writer.put("run", linear_key(), np.ones((300, 300), "f4"), "float32", Moment())
    writer.put("run", linear_key(tensor_name="output"), np.ones(3, "f4"), "float32", Moment())
    writer.close()
    return root / "run.zarr"


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def newer_format(root: Path) -> None:
    run = sound_run(root)
    edit_json(run / "zarr.json", lambda document: document["attributes"]["capd"].update(format=99))


def strange_format(root: Path) -> None:
    run = sound_run(root)
    edit_json(run / "zarr.json", lambda document: document["attributes"]["capd"].update(format="next"))


def newer_catalog(root: Path) -> None:
    database = sqlite3.connect(sound_run(root) / NODE / CATALOG_NAME)
    database.execute("PRAGMA user_version=99")
    database.commit()
    database.close()


def newer_frames(root: Path) -> None:
    """A `.partial` whose first frame says version 99 and is otherwise sound."""
    run = sound_run(root)
    [shard] = [path for path in run.glob("*/*/*/*/*input/data/c/**/*") if path.is_file()]
    content = bytearray(shard.read_bytes())
    content[4] = 99
    content[44:48] = struct.pack("<I", google_crc32c.value(bytes(content[:44])))
    (run / NODE / "spool" / "newer-00000000.partial").write_bytes(content)


def foreign_hierarchy(root: Path) -> None:
    root.mkdir()
    zarr.open_group(root / "run.zarr", mode="w").create_array("weights", shape=(3,), dtype="f4")


def attributes_of_another_kind(root: Path) -> None:
    (root / "run.zarr").mkdir(parents=True)
    document = {"zarr_format": 3, "node_type": "group", "attributes": ["capd"]}
    (root / "run.zarr" / "zarr.json").write_text(json.dumps(document))


def no_json(root: Path) -> None:
    (root / "run.zarr").mkdir(parents=True)
    (root / "run.zarr" / "zarr.json").write_text('{"zarr_format": 3,')


def a_file(root: Path) -> None:
    root.mkdir()
    (root / "run.zarr").write_text("this is no directory")


BAD: dict[Callable[[Path], None], str] = {
    newer_format: r"run\.zarr has format 99, but this capd reads up to 1; upgrade capd",
    strange_format: r"run\.zarr .*format 'next'.*upgrade capd",
    newer_catalog: r"catalog\.sqlite has catalog version 99, but this capd reads up to 1; upgrade capd",
    newer_frames: r"frame format 99 is newer than 1; use a newer capd",
    foreign_hierarchy: r"run\.zarr is a Zarr hierarchy, but not one that capd wrote",
    attributes_of_another_kind: r"run\.zarr is a Zarr hierarchy, but not one that capd wrote",
    no_json: r"zarr\.json is not JSON",
    a_file: r"run\.zarr is (not a run directory|a file, not a run directory)",
}


@pytest.fixture(params=list(BAD), ids=lambda make: make.__name__)
def bad(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A store root with one bad run `run`, and what is to be said about it."""
    root = tmp_path / "captures"
    request.param(root)
    return root / "run.zarr", BAD[request.param]


def listing(root: Path) -> dict[str, bytes | None]:
    """Everything below `root` with its content; the daemon's lock beside the runs does not count."""
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
        if not path.name.startswith(".capd-")
    }


def assert_one_line(result: Result, code: int, pattern: str) -> None:
    assert result.code == code, result
    assert result.out == ""
    [line] = result.err.splitlines()
    assert line.startswith("capd: ")
    assert "internal error" not in line
    assert re.search(pattern, line), line


def test_reading_commands_refuse_it(capd: Capd, bad: tuple[Path, str]) -> None:
    run, pattern = bad
    before = listing(run.parent)

    for command in (["ls", run], ["ls", run, "--json"], ["stats", run], ["show", run, "*input"]):
        assert_one_line(capd(*command), 1, pattern)

    assert listing(run.parent) == before


def test_open_refuses_it(bad: tuple[Path, str]) -> None:
    run, pattern = bad
    before = listing(run.parent)

    with pytest.raises(StoreError, match=pattern) as caught:
        capd_package.open(run)

    assert "\n" not in str(caught.value)
    assert listing(run.parent) == before


def test_open_of_a_directory_of_runs_names_one(tmp_path: Path) -> None:
    (tmp_path / "a.zarr").mkdir()

    with pytest.raises(StoreError, match=r"no zarr\.json; it holds runs, such as a\.zarr: open one"):
        capd_package.open(tmp_path)


@pytest.fixture
def serve(runtime_dir: Path) -> Iterator[Callable[..., DaemonProcess]]:
    with daemons() as made:

        def start(store: Path, *options: str) -> DaemonProcess:
            made.append(DaemonProcess(store, runtime_dir / "s.sock", "--node", "node0", *options))
            return made[-1]

        yield start


@pytest.fixture
def rank(runtime_dir: Path) -> Iterator[Rank]:
    made = Rank(runtime_dir / "s.sock")
    yield made
    made.close()


def test_a_daemon_sends_ranks_of_it_away_and_serves_other_runs(
    bad: tuple[Path, str], serve: Callable[..., DaemonProcess], rank: Rank
) -> None:
    run, pattern = bad
    before = listing(run)
    daemon = serve(run.parent)

    answer = rank.open()
    assert isinstance(answer, Reject)
    assert not answer.retry
    assert re.search(pattern, answer.message)
    rank.run_id = "other"
    rank.connect()
    rank.put(1)
    rank.expect_acks(1)
    rank.bye()

    assert daemon.stop() == 0, daemon.text()
    assert "Traceback" not in daemon.text()
    after = listing(run)
    if "frame" in pattern:  # found behind a catalog that is this version's own
        before.pop(str(run / NODE / CATALOG_NAME))
        after.pop(str(run / NODE / CATALOG_NAME))
    assert after == before


@pytest.mark.parametrize("verb", ["ls", "stats", "show"])
def test_a_path_where_nothing_is_stays_so(capd: Capd, tmp_path: Path, verb: str) -> None:
    more = ["*input"] if verb == "show" else []

    assert_one_line(capd(verb, tmp_path / "absent.zarr", *more), 1, "not a run directory; `capd ls`")
    assert_one_line(capd(verb, tmp_path / "absent", *more), 1, "no run in .*; name the store")

    assert not list(tmp_path.iterdir())


def test_a_store_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "captures"
    path.write_text("mine")

    result = run_capd("serve", "--store", path, "--endpoint", f"unix:{tmp_path}/s")

    assert_one_line(result, 1, "cannot use store .*; choose another --store")
    assert path.read_text() == "mine"


@pytest.fixture
def read_only(runtime_dir: Path) -> Iterator[Path]:
    """A store root on a file system that turned read-only."""
    place = runtime_dir / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "capd-test", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        sound_run(place / "captures")
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        yield place / "captures"
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_read_only_store_can_be_read_and_not_served(read_only: Path, capd: Capd, tmp_path: Path) -> None:
    run = read_only / "run.zarr"

    assert len(capd("ls", run, "--json").json) == 2
    assert capd("stats", run, "--json").json["committed"] == 2
    assert capd("show", run, "*input#0").code == 0
    assert capd_package.open(run).series[0].numpy(0).tobytes() == np.ones((300, 300), "f4").tobytes()
    result = run_capd("serve", "--store", read_only, "--endpoint", f"unix:{tmp_path}/s")
    assert_one_line(result, 1, "Read-only file system; choose another --store")


@pytest.mark.parametrize(
    "codec",
    [
        "lz9",
        "blosc:lz4:10:shuffle",
        "",
        *(
            pytest.param(one, marks=pytest.mark.fault)
            for one in ("zstd", "zstd:99", "zstd:1.5", "blosc:zstd:1")
        ),
    ],
)
def test_a_wrong_codec_is_a_usage_error_wherever_it_stands(tmp_path: Path, codec: str) -> None:
    settings = tmp_path / "capd.toml"
    settings.write_text(f'[daemon]\ncodec = "{codec}"\n')
    serve = ("serve", "--store", tmp_path / "captures", "--endpoint", f"unix:{tmp_path}/s")

    assert_one_line(run_capd(*serve, "--codec", codec), 2, "--codec: .*zstd:LEVEL")
    assert_one_line(run_capd(*serve, "--config", settings), 2, r"capd\.toml: \[daemon\] codec: .*zstd:LEVEL")
    if codec:  # an empty variable counts as not set
        assert_one_line(run_capd(*serve, CAPD_CODEC=codec), 2, r"codec \(env CAPD_CODEC\): .*zstd:LEVEL")

    assert [path.name for path in tmp_path.iterdir()] == ["capd.toml"]


def test_a_store_that_vanishes_while_it_is_served_refuses_and_is_not_made_anew(
    tmp_path: Path, serve: Callable[..., DaemonProcess], rank: Rank
) -> None:
    store = tmp_path / "captures"
    daemon = serve(store)
    rank.connect()
    rank.put(1)
    rank.expect_acks(1)
    numbers = iter(range(2, 10_000))

    def refused() -> str:
        number = next(numbers)
        rank.put(number)
        rank.listen_until(lambda: number in rank.acked or number in rank.nacked, f"outcome of {number}")
        return rank.nacked[number][1] if number in rank.nacked else ""

    shutil.rmtree(store)
    while not (message := refused()):
        pass
    assert str(store) in message
    assert "check its disk or mount" in message
    assert not store.exists()
    store.mkdir()
    while "check its disk" in (message := refused()):
        pass
    assert "restart `capd serve`" in message
    rank.disconnect()
    assert daemon.stop() == 1  # what waited for its seal cannot be sealed
    assert "Traceback" not in daemon.text()
    assert not list(store.iterdir())
