"""What a dead daemon leaves, and two daemons at once: swept only where the owner is provably dead, never two owners."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.fault.kit import figures
from tests.fault.kit.load import Gone
from tests.fault.kit.site import Site
from tests.kit.processes import until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]

RACES = 12
RACERS = 3


def test_leftovers_of_a_dead_daemon_are_swept_and_records_kept(site: Site) -> None:
    rank = site.rank()
    assert site.start()
    rank.connect()
    rank.offer(20)
    rank.drain()
    site.kill()
    spool = site.run / ".capd" / "node=n" / "spool"
    (spool / "document-0.tmp").write_bytes(b"half a docu")
    (spool / "group.tmp").touch()
    (spool / "0123456789abcdef.new" / "data").mkdir(parents=True)
    (spool / "ffffffffffffffffffff-00000000.partial").touch()
    (spool / "eeeeeeeeeeeeeeeeeeee-00000003.partial").write_bytes(os.urandom(5000))
    (spool / "small-00000099.log").touch()
    assert site.socket.exists()
    report = site.finish()
    assert report["found"] == 20
    assert not site.socket.exists()


@pytest.mark.parametrize("pid", [pytest.param(os.getpid(), id="own"), 1, 2**22 + 1, -1, 0])
def test_a_lock_file_that_nobody_holds_is_no_owner(pid: int, site: Site) -> None:
    """The note may name a process that lives by now: pids are used again. The lock itself counts."""
    site.store.mkdir()
    (site.store / ".capd-n.lock").write_text(
        json.dumps({"pid": pid, "endpoint": f"unix:{site.socket}"}) + "\n"
    )
    assert site.start(), site.says()
    assert site.stop() == 0


@pytest.mark.parametrize(
    "text", [b"", b"\0" * 100, b"{", pytest.param(os.urandom(64), id="random"), b"[" * 5000]
)
def test_a_lock_file_that_is_no_note_is_no_owner(text: bytes, site: Site) -> None:
    site.store.mkdir()
    (site.store / ".capd-n.lock").write_bytes(text)
    assert site.start(), site.says()
    assert site.stop() == 0


def test_a_stopped_owner_is_an_owner(site: Site) -> None:
    """A daemon that does not answer is not a dead one: neither its store nor its socket is taken."""
    assert site.start()
    assert site.process is not None
    first = site.process
    first.send_signal(19)  # SIGSTOP
    try:
        site.start_unwatched()
        assert site.ended() == 7, site.says()
        assert str(first.pid) in site.says()
    finally:
        first.send_signal(18)  # SIGCONT
        site.process = first
    assert site.stop() == 0


def test_a_file_in_place_of_the_socket_is_left_alone(site: Site) -> None:
    site.socket.write_text("precious")
    assert not site.start()
    assert site.ended() == 3, site.says()
    assert site.socket.read_text() == "precious"
    assert "Traceback" not in site.says()


def test_a_socket_of_somebody_else_is_not_taken(site: Site) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(site.socket))
        other.listen(1)
        assert not site.start()
        assert site.ended() == 7, site.says()
        assert site.socket.exists()


def racer(store: Path, endpoint: Path, said: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "capd", "serve", "--store", str(store), "--endpoint", f"unix:{endpoint}"]
    with said.open("wb") as log:
        return subprocess.Popen([*command, "--node", "n"], stdout=log, stderr=log)


@pytest.mark.parametrize("shared", ["store", "socket"])
def test_of_daemons_that_race_exactly_one_wins(shared: str, tmp_path: Path, runtime_dir: Path) -> None:
    exits: Counter[int] = Counter()
    for _ in range(RACES):
        said = [runtime_dir / f"said-{number}" for number in range(RACERS)]
        racers = [
            racer(
                tmp_path / ("store" if shared == "store" else f"store{number}"),
                runtime_dir / ("s.sock" if shared == "socket" else f"s{number}.sock"),
                said[number],
            )
            for number in range(RACERS)
        ]
        try:
            until(lambda racers=racers: sum(one.poll() is None for one in racers) <= 1, 60.0)
            ends = [one.wait(30) for one in racers if one.poll() is not None]
            texts = [path.read_text() for path in said]
            assert len(ends) == RACERS - 1, texts
            assert set(ends) == {7}, texts
            exits.update(ends)
            until(lambda said=said: sum("listening on" in path.read_text() for path in said) == 1)
        finally:
            for one in racers:
                one.kill()
                one.wait(30)
    figures.note(f"races for one {shared}", races=RACES, refused=exits[7], double_owners=0)


def test_a_rank_of_the_old_daemon_meets_the_new_one(site: Site) -> None:
    rank = site.rank()
    assert site.start()
    rank.connect()
    rank.offer(5)
    site.kill()
    with pytest.raises(Gone):
        rank.connect()
    assert site.finish()["found"] == 5
