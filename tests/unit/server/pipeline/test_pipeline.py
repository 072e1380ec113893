"""The dispatch of records: what comes together asks the disk budget once, and has no harm of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from capd.server.pipeline.jobs import RecordJob
from capd.server.pipeline.pipeline import Pipeline
from capd.store.run.options import StoreOptions
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define, Descriptor
from tests.kit.store.writing import CLIENT, Outcomes

DEFINE = Define(id=0, key=Key(quant_type="q", rank=0, tensor_name="x"), dtype="uint8")


@dataclass
class Limit:
    """Lets so many bytes pass, and remembers what it was asked."""

    room: int
    asked: list[tuple[int, int]] = field(default_factory=list)

    def refusal(self, nbytes: int, *, new_series: int = 0) -> str | None:
        self.asked.append((nbytes, new_series))
        if nbytes > self.room:
            return "full"
        self.room -= nbytes
        return None


def submit_together(root: Path, limit: Limit, *sizes: int) -> Outcomes:
    """Submit records of so many bytes at once, and wait for what becomes of them."""
    pipeline = Pipeline(root, "n", StoreOptions(), threads=1, staging_nbytes=1 << 20, budget=limit)
    sink = Outcomes()
    try:
        pipeline.open_run("run")
        pipeline.submit(
            *(
                RecordJob(
                    "run", CLIENT, sequence, DEFINE, Descriptor(sequence, 0, nbytes, 0, (nbytes,), Moment()),
                    memoryview(bytes(nbytes)), sink,
                )
                for sequence, nbytes in enumerate(sizes, 1)
            )
        )  # fmt: skip
        pipeline.flush().result(timeout=60)
    finally:
        assert pipeline.close(60)
    return sink


def test_records_that_come_together_ask_for_room_together(tmp_path: Path) -> None:
    limit = Limit(1 << 20)
    sink = submit_together(tmp_path, limit, 100, 100, 100)
    assert sink.committed_sequences == [1, 2, 3]
    assert limit.asked == [(2 * 300, 1)]  # each in the log, then in a shard; they open one series together


def test_where_there_is_no_room_for_all_those_are_refused_that_find_none(tmp_path: Path) -> None:
    limit = Limit(2 * 250)
    sink = submit_together(tmp_path, limit, 100, 200, 150)
    assert sink.committed_sequences == [1, 3]
    assert sink.refusals == [(2, DropReason.DISK_FULL, "full")]
    assert limit.room == 0
