"""Two nodes write one run of one store root: each its own part, neither touches the other's, readers see one store."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tensorstore
import zarr

import capd
from tests.kit import checking
from tests.kit.daemon import DaemonProcess, daemons, payload, wait_for
from tests.kit.daemon import Rank as HandRank
from tests.kit.processes import Rank, until
from tests.kit.processes import capd as run_capd

Start = Callable[..., DaemonProcess]
Listing = dict[str, tuple[int, int, int]]


@pytest.fixture
def start(runtime_dir: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts the daemon of a node; all nodes share one store root."""
    with daemons() as made:

        def start(node: str, *options: str) -> DaemonProcess:
            made.append(
                DaemonProcess(tmp_path / "store", runtime_dir / f"{node}.sock", "--node", node, *options)
            )
            return made[-1]

        yield start


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    """Real ranks that do not outlive the test."""
    made: list[Rank] = []
    yield made
    for rank in made:
        rank.kill()


@pytest.fixture
def hand_ranks() -> Iterator[list[HandRank]]:
    made: list[HandRank] = []
    yield made
    for rank in made:
        rank.close()


def kill(daemon: DaemonProcess) -> None:
    daemon.process.kill()
    daemon.process.wait()


def part_of(store: Path, node: str, rank: int) -> Listing:
    """Every file and directory that belongs to a node and to its rank: inode, size, time of change.

    Without the `-shm` file of its catalog, in which SQLite notes the readers: another daemon reads the sessions there.
    """
    run = store / "run.zarr"
    roots = [store / f".capd-{node}.lock", run / ".capd" / f"node={node}", *run.glob(f"*/rank{rank}")]
    paths = itertools.chain.from_iterable((root, *root.rglob("*")) for root in roots)
    stats = ((path, path.stat()) for path in paths if not path.name.endswith("-shm"))
    return {str(path): (found.st_ino, found.st_size, found.st_mtime_ns) for path, found in stats}


def committed(rank: Rank) -> int:
    return int(rank.ask("counters")["committed"])


def goes_on(rank: Rank, beyond: int = 50) -> None:
    """Wait until so many more captures of the rank are acknowledged."""
    goal = committed(rank) + beyond
    until(lambda: committed(rank) >= goal)


def assert_zarr_opens_everything(run: Path) -> int:
    """Every group and array of the hierarchy opens in zarr and tensorstore alike; returns the records."""
    records = 0
    documents = sorted(path for path in run.rglob("zarr.json") if ".capd" not in path.parts)
    for document in documents:
        node = zarr.open(document.parent, mode="r")
        if isinstance(node, zarr.Array):
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(document.parent)}}
            held = node[...]
            assert tensorstore.open(spec).result().read().result().tobytes() == held.tobytes()
            records += held.shape[0] if document.parent.name == "data" else 0
        else:
            assert isinstance(node, zarr.Group)
    return records


@pytest.mark.fault
def test_each_node_survives_kills_alone_and_readers_see_one_store(
    start: Start, ranks: list[Rank], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    a, b = start("a"), start("b")
    ranks += [Rank(f"unix:{daemon.path}", number) for number, daemon in enumerate((a, b))]
    on_a, on_b = ranks
    for rank in ranks:
        rank.ask("stream 0")
        goes_on(rank)

    kill(a)
    untouched = part_of(store, "a", 0)
    goes_on(on_b)
    assert b.stop() == 0  # seals its part
    b = start("b")  # recovers its part
    goes_on(on_b)
    assert part_of(store, "a", 0) == untouched

    kill(b)
    untouched = part_of(store, "b", 1)
    a = start("a")
    goes_on(on_a)
    assert part_of(store, "b", 1) == untouched
    assert a.text().count("left unsealed") == 1  # its own part
    b = start("b")
    goes_on(on_b)

    captured = [rank.ask("halt") for rank in ranks]
    for rank in ranks:
        assert rank.ask("flush 60")
        counters = rank.ask("counters")
        checking.assert_balanced(counters)
        assert not counters["dropped"]
        rank.leave()
    assert (a.stop(), b.stop()) == (0, 0), a.text() + b.text()

    run = store / "run.zarr"
    for number in range(2):
        assert checking.captured_numbers(run, number) == list(range(captured[number]))
    assert assert_zarr_opens_everything(run) == sum(captured)
    listed = json.loads(run_capd("ls", str(run), "--json").stdout)
    assert {(item["rank"], item["records"] > 0) for item in listed} == {(0, True), (1, True)}
    assert sum(item["records"] for item in listed) == sum(captured)
    counters = json.loads(run_capd("stats", str(run), "--json").stdout)
    assert (counters["offered"], counters["committed"]) == (sum(captured), sum(captured))
    assert {session["rank"] for session in counters["sessions"]} == {0, 1}


@pytest.mark.slow
def test_one_key_on_two_nodes_becomes_two_variants_that_both_go_on_after_kills(
    start: Start, hand_ranks: list[HandRank], tmp_path: Path
) -> None:
    sent: dict[str, list[int]] = {"a": [], "b": []}
    sequences = itertools.count(1)
    for _ in range(3):
        daemons = {node: start(node) for node in sent}
        for node, daemon in daemons.items():
            rank = HandRank(daemon.path)
            hand_ranks.append(rank)
            rank.connect()
            fresh = [next(sequences) for _ in range(4)]
            rank.put(*fresh)
            rank.expect_acks(*fresh)
            sent[node] += fresh
            rank.disconnect()
        for daemon in daemons.values():
            kill(daemon)
    daemons = {node: start(node) for node in sent}
    for daemon in daemons.values():
        wait_for(lambda daemon=daemon: daemon.run_stats("run"), "the run is taken up")
        assert daemon.stop() == 0, daemon.text()

    run = tmp_path / "store" / "run.zarr"
    found = capd.open(run).series
    assert len(found) == 2
    assert found[0].key == found[1].key
    assert found[0].path + "~v1" == found[1].path
    by_node = {}
    for series in found:
        attributes = json.loads((run / series.path / "zarr.json").read_text())["attributes"]["capd"]
        by_node[attributes["node"]] = [record.iteration for record in series.records]
        assert [series.numpy(i).tobytes() for i in range(len(series))] == [
            payload(record.iteration) for record in series.records
        ]
    assert by_node == sent
    assert assert_zarr_opens_everything(run) == 24
    assert not list(run.glob(".capd/node=*/spool/*"))
