"""Policies on a GPU: what finds no room is dropped, waited for, thinned or reduced, and all of it is counted."""

from __future__ import annotations

import json

import pytest
import torch

from capd.store.format.statistics import public, summarise
from tests.kit.gpu.job import Job, same_bits

# The host issues three rings' worth and more while the device sleeps. Four fit, and rows of statistics beside them. The
# arena is as large and page-locked as if it had held all of them before: copies to other memory are not issued ahead.
LEAD = """
import json
ready()
size = capacity() * 2 // 9 // 4096 * 4096 // 4
count = 16
tensor = torch.empty(size, device="cuda")
capture(tensor.fill_(-1.0), "t", count)
drained()
grown(5 * capacity())
torch.cuda.synchronize()
busy = torch.cuda.Event()
torch.cuda._sleep(3_000_000_000)
busy.record()
started = time.perf_counter()
for n in range(count):
    tensor.fill_(float(n))
    capture(tensor, "t", n)
issued_s = time.perf_counter() - started
ahead = not busy.query()
counters = drained()
print(json.dumps({"count": count, "ahead": ahead, "issued_s": issued_s, "size": size, **counters}))
"""


def lead(job: Job, **settings: str) -> tuple[dict[str, object], dict[int, torch.Tensor]]:
    """Run it; what it counted, and what arrived by iteration, each of which is checked."""
    captured = job.run(LEAD, arena_bytes=str(2 << 30), **settings)
    found = json.loads(captured.output.splitlines()[-1])
    arrived = {n: tensor for (_, n), tensor in captured.tensors.items() if n < found["count"]}
    for n, tensor in arrived.items():
        assert same_bits(tensor, torch.full((found["size"],), float(n))), n
    return found, arrived


def test_drop_counts_what_finds_no_room_and_never_waits(job: Job) -> None:
    found, arrived = lead(job, policy="drop")
    assert found["ahead"]
    assert found["dropped"] == {"ring_full": found["count"] - len(arrived)}
    assert 2 <= len(arrived) < found["count"]
    assert found["committed"] == len(arrived) + 1


def test_block_drops_nothing(job: Job) -> None:
    found, arrived = lead(job, policy="block")
    assert found["dropped"] == {}
    assert sorted(arrived) == list(range(16))


@pytest.mark.parametrize("policy", ["block", "drop"])
def test_a_ring_ordered_by_the_stream_neither_drops_nor_waits(job: Job, policy: str) -> None:
    """The host leads its device by seconds: the device waits for room, and the host for nothing."""
    found, arrived = lead(job, policy=policy, ring="wait")
    assert found["ahead"], f"the host took {found['issued_s']} s"
    assert found["dropped"] == {}
    assert sorted(arrived) == list(range(16))


def test_stats_keeps_the_statistics_of_what_finds_no_room(job: Job) -> None:
    found, _ = lead(job, policy="stats")
    assert found["dropped"] == {}
    kept = {}
    for series in job.store().series:
        for record in series.records:
            kept[record.iteration] = series.kept
            if record.iteration < 16:
                assert record.stats is not None
                value = float(record.iteration)
                assert (record.stats.min, record.stats.max, record.stats.count) == (
                    value,
                    value,
                    found["size"],
                )
    assert sorted(kept) == list(range(17))
    assert set(kept.values()) == {"tensor", "statistics"}


THIN = """
ready()
size = capacity() // 8 // 4096 * 4096 // 4
tensor = torch.empty(size, device="cuda")
for n in range(40):
    tensor.fill_(float(n))
    capture(tensor, "t", n)
    if n % 10 == 0:
        torch.cuda._sleep(200_000_000)
counters = drained()
print(counters["offered"], counters["committed"], sum(counters["dropped"].values()), size)
"""


def test_thin_leaves_out_whole_calls_and_counts_them(job: Job) -> None:
    captured = job.run(THIN, policy="thin")
    offered, committed, dropped, size = map(int, captured.output.split()[-4:])
    assert offered == committed + dropped
    assert len(captured.tensors) == committed > 0
    for (_, n), tensor in captured.tensors.items():
        assert same_bits(tensor, torch.full((size,), float(n))), n


STATS = """
ready()
torch.manual_seed(8)
for n, shape in enumerate([(), (5,), (300, 401), (1 << 20,)]):
    for dtype in (torch.float32, torch.bfloat16):
        tensor = (torch.randn(shape, device="cuda") * 100).to(dtype)
        hold(tensor.float(), str(dtype)[6:], n)
        capture(tensor, str(dtype)[6:], n)
        tensor.zero_()
assert not drained()["dropped"]
save()
"""


def test_in_mode_stats_the_row_is_of_the_tensor_as_it_was(job: Job) -> None:
    held = job.run(STATS, mode="stats").held
    found = {
        (series.key.tensor_name, record.iteration): (series.kept, record.stats)
        for series in job.store().series
        for record in series.records
    }
    assert found.keys() == held.keys()
    for key, tensor in held.items():
        kept, stats = found[key]
        expected = public(summarise(tensor.numpy(), "float32"))
        assert kept == "statistics"
        assert stats is not None
        assert (stats.min, stats.max, stats.count) == (expected.min, expected.max, expected.count), key
        assert stats.exponent_histogram == expected.exponent_histogram, key
        assert stats.sum == pytest.approx(expected.sum, rel=1e-9, abs=1e-6), key
