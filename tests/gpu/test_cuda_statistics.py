"""Statistics computed on the device equal those that the daemon computes of the same bytes."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import Job

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
stager = session().devices.stager(torch.device("cuda", 0))
print("kernel:", stager.row_place(torch.bfloat16, 1 << 20, True) is not None)
"""
SECOND = 'session().prepare([torch.device("cuda", 1)]); ready()'
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
        for field in ("sum", "sum_sq"):
            assert getattr(device, field) == pytest.approx(
                getattr(host, field), rel=1e-9, abs=1e-9 * max(1.0, (host.sum_sq * host.count) ** 0.5)
            ), (n, field)
