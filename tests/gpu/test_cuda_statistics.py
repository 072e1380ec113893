"""Statistics computed on the device equal those that the daemon computes of the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.gpu.job import Job

# The same tensors from the device and from the host: of the latter the daemon computes the statistics.
BOTH = """
ready()
generator = torch.Generator("cuda").manual_seed(3)
n = 0
for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64):
    for shape in ((5,), (300, 400), (1024, 1025), (2, 3, 70_001), ()):
        tensor = torch.randn(shape, device="cuda", generator=generator) * 1000
        if tensor.numel() > 5:
            flat = tensor.view(-1)
            flat[::7] = 0.0
            flat[1::1001] = float("nan")
            flat[2::1003] = float("inf")
            flat[3::1007] = -1e-40
        tensor = tensor.to(dtype)
        host = tensor.cpu()
        torch.cuda.set_sync_debug_mode("error")
        capture(tensor, "device", n)
        torch.cuda.set_sync_debug_mode("default")
        capture(host, "host", n)
        n += 1
assert not drained()["dropped"]
"""
SECOND = 'session().prepare([torch.device("cuda", 1)]); ready()'
# Many rows at once, while the device has not come to the first ones: of the kernel, of torch's operations, and of those
# under deterministic algorithms.
ROWS = """
from capd_client.devstats import ROW_DTYPES, fill_rows, has_kernel, prepare, warm
from capd_client.devstats.formulas import fill_from_values
from capd_client.protocol.statistics_row import BINS, ROW_VALUES

device = torch.device("cuda", 0)
kinds = [torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
warm(device, rows=True)
prepare(device, dtypes=kinds)
kernels = [has_kernel(device, kind) for kind in kinds].count(True)
print("kernels:", kernels)
generator = torch.Generator("cuda").manual_seed(3)
flats = []
for kind in kinds:
    for n in (1, 7, 4096, 4099, 70_001, (1 << 20) + 5):
        flat = torch.randn(n, device="cuda", generator=generator) * 1000
        if n > 5:
            flat[::7] = 0.0
            flat[1::1001] = float("nan")
            flat[2::1003] = float("inf")
            flat[3::1007] = -1e-40
        flats.append(flat.to(kind))
rounds = 12 if kernels else 2
rows = torch.zeros((rounds + 2, len(flats), ROW_VALUES), dtype=torch.float64, device="cuda")
fill_rows(list(zip(flats, rows[0])))
torch.cuda.synchronize()
if kernels:
    torch.cuda._sleep(10**9)
torch.cuda.set_sync_debug_mode("error")
started = time.perf_counter()
for n in range(rounds):  # others each time: a table that is overwritten too early gives rows of other tensors
    chosen = [index for index in range(len(flats)) if (index + n) % 3]
    fill_rows([(flats[index], rows[n + 1][index]) for index in chosen])
print(f"{(time.perf_counter() - started) * 1e6 / rounds:.0f} us a call of {len(chosen)} segments")
for flat, row in zip(flats, rows[-1]):
    fill_from_values(flat, row, blind=True)
torch.cuda.set_sync_debug_mode("default")
found = rows.cpu()
for n in range(rounds):
    for index in range(len(flats)):
        if (index + n) % 3:
            assert torch.equal(found[n + 1, index].nan_to_num(7.5), found[0, index].nan_to_num(7.5)), (n, index)
sums = [7, 8, BINS.stop, BINS.stop + 1]  # of the values, their squares, cubes and fourth powers
exact = [index for index in range(ROW_VALUES) if index not in sums]
for one, other in zip(found[0], found[-1]):
    assert torch.equal(one[exact].nan_to_num(7.5), other[exact].nan_to_num(7.5)), (one, other)
    squares, fourths = other[8], other[BINS.stop + 1]
    slack = torch.stack([(other[0] * squares).sqrt(), squares, (squares * fourths).sqrt(), fourths]) * 1e-10
    assert ((one[sums] - other[sums]).abs() <= slack).all(), (one[sums], other[sums])

codes = torch.arange(1 << 20, device="cuda").to(torch.uint8)
pair = torch.zeros((2, ROW_VALUES), dtype=torch.float64, device="cuda")
for kind in sorted(ROW_DTYPES, key=str):
    for row, deterministic in zip(pair, (False, True)):
        torch.use_deterministic_algorithms(deterministic)
        torch.cuda.set_sync_debug_mode("error")
        fill_from_values(codes.view(kind), row, blind=True)
        torch.cuda.set_sync_debug_mode("default")
    torch.use_deterministic_algorithms(False)
    usual, ordered = pair.cpu().nan_to_num(7.5)
    assert torch.equal(usual[BINS], ordered[BINS]), kind
print("rows agree")
capture(torch.ones(3, device="cuda"), "x")
assert not drained()["dropped"]
"""
# The first steps of a job that finds nothing in Triton's cache.
FIRST_STEPS = """
import sys
from capd_client.devstats import fill_row, has_kernel, prepare
from capd_client.rowkernel.artifacts import mark_of
from capd_client.devstats.compiling import target_of

device = torch.device("cuda", 0)
over = threading.Event()
thread = threading.Thread(target=prepare, args=(device,), kwargs={"dtypes": [torch.bfloat16], "may_load": over.is_set})
weights = torch.randn(1024, 1024, device="cuda")
imported = "triton" in sys.modules
thread.start()
mark = mark_of(target_of(device), "bfloat16")
deadline = time.monotonic() + 60
while not mark.exists() and time.monotonic() < deadline:
    (weights @ weights).sum().item()
assert mark.exists()
time.sleep(0.5)
assert ("triton" in sys.modules) is imported
assert not has_kernel(device, torch.bfloat16)
before = {path.name for path in mark.parent.rglob("*")}
over.set()
thread.join(60)
assert has_kernel(device, torch.bfloat16)
made = {path.name for path in mark.parent.rglob("*")} - before
print("made in the job:", sorted(made))
capture(weights, "x")
assert not drained()["dropped"]
"""
EXACT = ("count", "nan", "inf", "zero", "min", "max", "absmax", "exponent_histogram")


@pytest.mark.parametrize("mode", ["tensor", "stats"])
def test_device_and_daemon_agree(job: Job, mode: str) -> None:
    assert_agreement(job, BOTH, mode)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("mode", ["tensor", "stats"])
def test_on_a_device_that_is_not_the_current_one_as_well(job: Job, mode: str) -> None:
    assert_agreement(
        job,
        BOTH.replace('"cuda"', '"cuda:1"').replace('"cuda:1", 0', '"cuda", 1').replace("ready()", SECOND),
        mode,
    )


@pytest.mark.parametrize("kernels", [5])
def test_many_rows_at_once_are_those_of_torchs_operations_and_nothing_waits(job: Job, kernels: int) -> None:
    output = job.run(ROWS).output
    print(output)
    assert f"kernels: {kernels}" in output
    assert "rows agree" in output


def test_in_the_first_steps_nothing_is_compiled_or_loaded_in_the_job(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    output = job.run(FIRST_STEPS).output
    print(output)
    assert "made in the job: []" in output


def assert_agreement(job: Job, code: str, mode: str) -> None:
    captured = job.run(code, mode=mode)
    print(captured.output)
    stats = {
        (series.key.tensor_name, record.iteration): record.stats
        for series in job.store().series
        for record in series.records
    }
    assert len(stats) == 60
    for n in range(30):
        device, host = stats["device", n], stats["host", n]
        assert device is not None
        assert host is not None
        for field in EXACT:
            assert getattr(device, field) == getattr(host, field), (n, field)
        # An error of a sum is measured against the sum of the magnitudes, which is not above this.
        most = {
            "sum": (host.sum_sq * host.count) ** 0.5,
            "sum_sq": host.sum_sq,
            "sum_cube": (host.sum_sq * host.sum_fourth) ** 0.5,
            "sum_fourth": host.sum_fourth,
        }
        for field, magnitude in most.items():
            near = pytest.approx(getattr(host, field), rel=1e-9, abs=1e-9 * magnitude)
            assert getattr(device, field) == near, (n, field)
