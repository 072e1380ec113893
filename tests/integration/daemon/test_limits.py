"""Machines that give little: a small /dev/shm, no locked memory, a memory cgroup, one core of many."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit import forking
from tests.kit.checking import assert_balanced
from tests.kit.processes import capd
from tests.kit.tiers import rows

MIB = 1 << 20
PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14
JOB = """
    import json, os, sys
    import torch
    import capd_client, capd_client.api

    torch.manual_seed(0)
    count, nbytes = int(sys.argv[1]), int(sys.argv[2])
    for n in range(count):
        capd_client.capture(torch.full((nbytes,), n % 251, dtype=torch.uint8), tensor_name="x", iteration=n)
    session = capd_client.api.session()
    session.arena.prefaulted()
    flushed = capd_client.flush(100)
    print(json.dumps({
        "flushed": flushed, "counters": capd_client.counters(),
        "arena": session.arena.nbytes - session.arena.start + 4096,  # what CAPD_ARENA_BYTES counts
        "threads": torch.get_num_threads(), "cpus": sorted(os.sched_getaffinity(0)),
        "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
    }))
"""


class Place:
    """A directory to run jobs in with `capd run`: daemon and rank under the same limits."""

    def __init__(self, directory: Path) -> None:
        self.store, self._script = directory / "store", directory / "job.py"
        self._script.write_text(textwrap.dedent(JOB))

    def run(
        self,
        count: int,
        nbytes: int,
        *,
        prefix: tuple[str, ...] = (),
        limit: Callable[[], object] | None = None,
        **environment: str,
    ) -> dict[str, Any]:
        """Capture `count` tensors of `nbytes`; what the job said at its end. It must have ended in order."""
        done = subprocess.run(
            [
                *prefix, sys.executable, "-m", "capd", "run", "--store", str(self.store), "--run-id", "run",
                "--policy", "block", "--", sys.executable, str(self._script), str(count), str(nbytes),
            ],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=110,
            preexec_fn=limit,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
        assert said["flushed"], done.stderr
        assert said["counters"] == {"offered": count, "committed": count, "in_flight": 0, "dropped": {}}
        stats = json.loads(capd("stats", str(self.store / "run.zarr"), "--json").stdout)
        assert_balanced(stats)
        assert (stats["committed"], stats["clean"]) == (count, True)
        return said


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_dev_shm_smaller_than_the_arena_is_no_matter(place: Place) -> None:
    """As containers have it: 64 MiB, which files there would fill until a write ends in SIGBUS."""
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    if os.getuid() != 0 or subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode:
        pytest.skip("only root may mount a small /dev/shm, in a mount namespace of its own")
    said = place.run(
        12,
        20 * MIB,
        prefix=("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"),
        CAPD_ARENA_BYTES=str(192 * MIB),
    )
    assert said["shm"] == 64 * MIB
    assert said["arena"] == 192 * MIB


@pytest.mark.parametrize("nbytes", rows([0, 64 << 10], [0]))
def test_without_locked_memory_capture_is_as_ever(place: Place, nbytes: int) -> None:
    libc = ctypes.CDLL(None)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes, nbytes))
        libc.prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)  # which root has, and is not limited by it

    place.run(8, 2 * MIB, limit=limit, CAPD_ARENA_BYTES=str(8 * MIB))


MEANS = {
    "files": "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) - 1,) * 2)",
    "size of a file": "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20,) * 2)",
    "memory for the arena": "resource.setrlimit(resource.RLIMIT_AS, (mapped + (8 << 20), -1))",
    "memory for a thread": "resource.setrlimit(resource.RLIMIT_AS, (mapped + (70 << 20), -1))",
    "threads": "os.setuid(12345); resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))",
}
WITHOUT = """
    import os, resource
    import torch
    import capd_client, capd_client.api

    torch.set_num_threads(1)
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    {limit}
    weight = torch.ones(8, 8, requires_grad=True)
    for n in range(50):
        product = torch.ones(8, 8) @ weight
        capd_client.capture(product, tensor_name="y", iteration=n)
        product.sum().backward()
    assert capd_client.flush(10)
    capd_client.close()
    print(int(weight.grad.sum()), capd_client.counters()["in_flight"])
"""


@pytest.mark.parametrize("means", rows(MEANS, ["files", "memory for the arena", "threads"]))
def test_a_rank_without_the_means_to_capture_trains_on_and_says_so_once(
    means: str, tmp_path: Path, runtime_dir: Path
) -> None:
    if means == "threads" and os.getuid() != 0:
        pytest.skip("only root can become a user without any process")
    done = forking.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT).format(limit=MEANS[means])],
        env={
            **os.environ,
            "CAPD_ENDPOINT": f"unix:{runtime_dir}/nobody",
            "CAPD_ARENA_BYTES": str(64 * MIB),
            "CAPD_POLICY": "block",
        },
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, f"{50 * 8 * 8 * 8} 0\n"), done.stderr
    assert done.stderr.count("capture is off") == 1
    assert "Traceback" not in done.stderr


class MemoryGroup:
    """A memory cgroup below this process's own, version 1 or 2; OSError where none can be made."""

    def __init__(self, limit_nbytes: int) -> None:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or controllers == "memory":
                base = Path("/sys/fs/cgroup", controllers) / path.strip("/")
                limit = "memory.limit_in_bytes" if controllers else "memory.max"
                self.path = base / f"capd-test-{uuid.uuid4().hex[:8]}"
                self.path.mkdir()
                if (self.path / limit).exists():
                    (self.path / limit).write_text(str(limit_nbytes))
                    return
                self.path.rmdir()
        raise OSError("no memory controller")

    def enter(self) -> None:
        """Move the calling process in."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def killed(self) -> int:
        """Processes that were killed for memory here."""
        for name in ("memory.oom_control", "memory.events"):
            if (self.path / name).exists():
                values = dict(line.split() for line in (self.path / name).read_text().splitlines())
                return int(values["oom_kill"])
        raise AssertionError(f"{self.path} counts no kills")


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        made = MemoryGroup(1200 * MIB)  # torch twice, the daemon, and less than the arena of a free machine
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield made
    made.path.rmdir()


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(None, id="default"),
        pytest.param(4096 * MIB, id="asked for too much", marks=pytest.mark.fault),
    ],
)
def test_the_arena_fits_into_a_memory_cgroup(place: Place, group: MemoryGroup, asked: int | None) -> None:
    """Its pages are made ahead, so one that is too large would have the rank killed before its first step."""
    said = place.run(
        40, 16 * MIB, limit=group.enter, **({} if asked is None else {"CAPD_ARENA_BYTES": str(asked)})
    )
    assert said["arena"] < 1200 * MIB * (0.2 if asked is None else 0.5)
    assert group.killed() == 0


def test_the_daemon_keeps_its_staging_within_a_memory_cgroup(
    group: MemoryGroup, tmp_path: Path, runtime_dir: Path
) -> None:
    from tests.kit.daemon import DaemonProcess

    daemon = DaemonProcess(
        tmp_path / "store",
        runtime_dir / "s.sock",
        env={**os.environ, "CAPD_STAGING_BYTES": "1000000000"},
        preexec_fn=group.enter,
    )
    try:
        [staging] = re.findall(r"(\d+) MiB staging", daemon.text())
        assert int(staging) <= 300  # of 1200 MiB
        assert group.killed() == 0
    finally:
        daemon.stop()


@pytest.mark.slow
def test_one_core_for_daemon_and_rank_together_is_enough(place: Place) -> None:
    """Pinned as batch systems do it: neither waits for the other, and nobody starts threads for cores it has not."""
    core = min(os.sched_getaffinity(0))
    said = place.run(60, MIB, limit=lambda: os.sched_setaffinity(0, {core}), CAPD_ARENA_BYTES=str(8 * MIB))
    assert said["cpus"] == [core]
    assert said["threads"] == 1


def test_the_daemon_takes_its_threads_from_the_cores_it_may_use(tmp_path: Path, runtime_dir: Path) -> None:
    from tests.kit.daemon import DaemonProcess

    core = min(os.sched_getaffinity(0))
    daemon = DaemonProcess(
        tmp_path / "store", runtime_dir / "s.sock", preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    try:
        assert daemon.stats()["threads"] == 1
        tasks = list(Path(f"/proc/{daemon.process.pid}/task").iterdir())
        assert len(tasks) < 12, [(task / "comm").read_text() for task in tasks]
    finally:
        daemon.stop()
