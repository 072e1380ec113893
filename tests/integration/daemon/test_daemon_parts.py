"""Records in parts that a broken rank sends: they cost that record, not the run that others write to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from capd_client.protocol.counter_page import PAGE_NBYTES, DropReason
from capd_client.protocol.key import Moment
from capd_client.protocol.messages import Descriptor, Part, Put
from tests.kit.daemon import DaemonProcess, Rank, daemons, wait_for


@pytest.fixture
def daemon(tmp_path: Path, runtime_dir: Path) -> Iterator[DaemonProcess]:
    with daemons() as made:
        made.append(DaemonProcess(tmp_path / "store", runtime_dir / "s"))
        yield made[0]


@pytest.fixture
def ranks(daemon: DaemonProcess) -> Iterator[tuple[Rank, Rank]]:
    made = Rank(daemon.path), Rank(daemon.path, rank=1)
    for rank in made:
        rank.connect()
    yield made
    for rank in made:
        rank.close()


def part(sequence: int, record: int, first: int, nbytes: int, of: int) -> Descriptor:
    """Bytes `first` … `first + nbytes` of a bfloat16 record that claims to have `of`."""
    return Descriptor(sequence, PAGE_NBYTES, nbytes, 0, (of // 2,), Moment(), part=Part(record, first, of))


def scratch_files(daemon: DaemonProcess) -> list[str]:
    """Files without a name that the daemon has open in the spool."""
    return [name for name in daemon.open_links() if "/spool/#" in name]


def test_parts_that_contradict_each_other_cost_their_record_alone(
    daemon: DaemonProcess, ranks: tuple[Rank, Rank]
) -> None:
    broken, other = ranks
    broken.memory[PAGE_NBYTES : PAGE_NBYTES + 4000] = bytes(4000)
    broken.send(Put([part(21, 20, 0, 4000, 8000)]))
    broken.expect_acks(21)
    assert len(scratch_files(daemon)) == 1
    broken.send(Put([part(22, 20, 4000, 8, 4008)]))  # would make a record of 4008 bytes out of 8000
    broken.listen_until(lambda: 22 in broken.nacked or 22 in broken.acked, "answer")
    other.put(1, 2, 3)
    other.expect_acks(1, 2, 3)
    assert daemon.control("seal").ok, daemon.text()
    assert broken.nacked[22][0] is DropReason.BAD_DESCRIPTOR
    wait_for(lambda: not scratch_files(daemon), "the scratch file gone")
    assert daemon.stop() == 0, daemon.text()
