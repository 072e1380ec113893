"""A daemon that is killed while copies from a GPU are under way, and started again: nothing is lost or doubled."""

from __future__ import annotations

import json

import torch

from tests.kit.gpu.job import Job, same_bits

STREAM = """
import json
ready()
torch.cuda.synchronize()
print("{}", flush=True)
n = 0
while not sys.stdin.readline().startswith("halt"):
    torch.cuda._sleep(50_000_000)  # what follows is under way when the answer is read
    for size in (700, 90_000, 1_000_000):
        tensor = torch.full((size,), float(n), device="cuda")
        capture(tensor, f"t{size}", n)
        tensor.zero_()
    n += 1
    counters = capd_client.counters()
    print(json.dumps(counters), flush=True)
print(json.dumps({"rounds": n, **drained()}), flush=True)
"""


def test_a_daemon_killed_amid_copies_loses_and_doubles_nothing(job: Job) -> None:
    process = job.start(STREAM, arena_bytes=str(256 << 20))
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        answers = (json.loads(line) for line in process.stdout if line.startswith("{"))  # not what is logged
        assert next(answers) == {}
        for restarts in range(3):
            counters = {}
            for _ in range(12):
                process.stdin.write("more\n")
                process.stdin.flush()
                counters = next(answers)
            assert counters["in_flight"], "nothing was under way when it was killed"
            job.daemon.kill()
            for _ in range(2 + restarts):  # captured while nobody listens
                process.stdin.write("more\n")
                process.stdin.flush()
                next(answers)
            job.daemon.start()
        process.stdin.write("halt\n")
        process.stdin.flush()
        counters = next(answers)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()

    rounds = counters["rounds"]
    assert rounds == 3 * 12 + 2 + 3 + 4
    assert counters["dropped"] == {}
    assert counters["committed"] == counters["offered"] == 3 * rounds
    job.stored()
    found = job.by_module()  # each of them once
    assert len(found) == 3 * rounds
    for (_, name, n), tensor in found.items():
        assert same_bits(tensor, torch.full((int(name[1:]),), float(n))), (name, n)
