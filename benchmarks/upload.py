"""The cost of uploads: MB per CPU second of the daemon, and the captured step beside an upload against the step alone.

    python benchmarks/upload.py [--rounds 24] [--backlog-mib 3072] [--json FILE]

First the daemon uploads alone, to a real S3 server (SeaweedFS) on this machine: bytes per second of the daemon's CPU
time, all of its threads counted. The shards do not compress.

Then a job runs, that of training_overhead.py: 68 tensors, 35.1 MB a step. Two variants take turns in blocks within one
process. Beside "uploading", shards of the store go up all the time. Beside "alone" the server is stopped (SIGSTOP), so
the uploads hang and cost nothing. "wall x" is the time of a step, uploading against alone, round by round: the median
of the ratios. The server of this part stands for one elsewhere: a sink, which takes next to nothing of the machine.
With --server seaweedfs it is a real one with the lowest priority. It takes most of a core, so that the ratio says more
of the server than of capd.

must: 1.02, and no drop.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import capd_client
from benchmarks.kit.common import Daemon, cpu_s, daemon, keep_freed_memory, machine, report, spread
from benchmarks.kit.sink_server import sink_server
from benchmarks.store.store_capd import CapdWriter, definition
from benchmarks.training_overhead import (
    ARENA_NBYTES,
    VOCABULARY,
    Variant,
    own_client,
    wait_until_acknowledged,
)
from capd.errors import ObjectStoreError
from capd.server.net.daemon_client import connect
from capd.server.net.endpoint import parse
from capd.store.objects.address import parse_address
from capd.store.objects.bucket import Bucket
from capd.store.segments.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_NBYTES,
    Manifest,
    decode_manifest,
    node_prefix,
)
from tests.kit.objects.server import S3Server
from tests.kit.objects.service import S3Service

MUST = 1.02
SEQUENCE = 128
NODE = "n0"
RECORD = (2048, 2048)
SERIES = 96
PATIENCE_S = 600.0
LOWEST_PRIORITY = 19


class Server:
    """An S3 server that can be stopped and continued as a process."""

    def __init__(self, service: S3Service, pid: int) -> None:
        self.bucket = service.make_bucket()
        # The time in which it answered, between `go` and `halt`.
        self.answered_s = 0.0
        self._group, self._since = pid, 0.0

    def go(self) -> None:
        """Answer."""
        os.killpg(self._group, signal.SIGCONT)
        self._since = time.monotonic()

    def halt(self) -> None:
        """Hang."""
        os.killpg(self._group, signal.SIGSTOP)
        self.answered_s += time.monotonic() - self._since


@contextlib.contextmanager
def seaweedfs(directory: Path | None) -> Iterator[Server]:
    """Start SeaweedFS with the lowest priority, with its data below `directory`."""
    server = S3Server(Path(tempfile.mkdtemp(prefix="capd-s3-", dir=directory))).start()
    assert server.process is not None
    try:
        _lower(server.process.pid)
        yield Server(server, server.process.pid)
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)
        server.discard()


@contextlib.contextmanager
def sink() -> Iterator[Server]:
    """Start the server that drops what it gets."""
    with sink_server() as (service, pid):
        yield Server(service, pid)


def _lower(group: int) -> None:
    os.setpriority(os.PRIO_PGRP, group, LOWEST_PRIORITY)
    for thread in Path(f"/proc/{group}/task").iterdir():
        os.setpriority(os.PRIO_PROCESS, int(thread.name), LOWEST_PRIORITY)
    with contextlib.suppress(OSError):
        # Where sessions share the processor, the session of the server has a priority of its own.
        Path(f"/proc/{group}/autogroup").write_text(str(LOWEST_PRIORITY))


def fill(store: Path, nbytes: int) -> None:
    """Write a sealed run of about `nbytes` that do not compress."""
    random = np.random.default_rng(0)
    writer = CapdWriter(store, threads=1, codec="none", statistics=False)
    each = 2 * RECORD[0] * RECORD[1]
    for number in range(nbytes // each):
        bits = random.integers(0, 2**16, RECORD, dtype=np.uint16)
        writer.put(definition(number % SERIES), memoryview(bits).cast("B"), RECORD, number // SERIES)
        # The memory of the records is then bounded.
        writer.flush()
    writer.close()


@contextlib.contextmanager
def uploading_daemon(directory: Path, server: Server, prefix: str, backlog: int) -> Iterator[Daemon]:
    """Start a daemon whose store has sealed shards that are not uploaded."""
    os.environ.update(server.bucket.environment())
    options = ["--node", NODE, "--upload-to", server.bucket.url(prefix)]
    with daemon(
        directory, arena_nbytes=ARENA_NBYTES, options=options, prepare=partial(fill, nbytes=backlog)
    ) as running:
        yield running


def manifest_of(server: Server, prefix: str) -> Manifest | None:
    """Return the manifest of the run that goes up; None before there is one."""
    bucket = Bucket(parse_address(f"{server.bucket.url(prefix)}/run.zarr"))
    try:
        payload = bucket.get(f"{node_prefix(NODE)}/{MANIFEST_NAME}", at_most=MAX_MANIFEST_NBYTES)
    except ObjectStoreError as error:
        if error.reason != "missing":
            raise
        return None
    return decode_manifest(payload, bucket.address)


def measure_rate(directory: Path, server: Server, backlog: int) -> dict[str, float]:
    """Return the bytes, the CPU and the wall seconds of a daemon that only uploads."""
    with uploading_daemon(directory, server, "alone", backlog) as running:
        began, until = time.monotonic(), time.monotonic() + PATIENCE_S
        while (found := manifest_of(server, "alone")) is None or not found.is_complete:
            if time.monotonic() > until:
                raise SystemExit(f"the upload took more than {PATIENCE_S:.0f} s")
            time.sleep(0.1)
        wall, cpu = time.monotonic() - began, cpu_s(running.pid)
    mb = found.object_bytes / 1e6
    return {
        "mb": mb, "cpu_s": cpu, "wall_s": wall, "mb_per_cpu_s": mb / cpu, "mb_per_s": mb / wall,
        "peak_anonymous_mib": running.peak_anonymous_mib,
    }  # fmt: skip


def uploaded_nbytes(running: Daemon) -> int:
    """Return the bytes that a daemon has uploaded."""
    with connect(parse(running.endpoint)) as tool:
        found = tool.stats(None).upload
    assert found is not None
    return found.bytes


def make_variants(server: Server) -> list[Variant]:
    """Return capd alone, and capd beside uploads."""
    client = own_client()

    def watch(model: torch.nn.Module) -> Any:
        return capd_client.watch(
            model, steps="all", tensors=client.tensors, select={"components": client.components}
        )

    def watch_uploading(model: torch.nn.Module) -> Any:
        server.go()
        return watch(model)

    return [
        Variant("alone", watch, settle=wait_until_acknowledged),
        Variant("uploading", watch_uploading, settle=wait_until_acknowledged, after_block=server.halt),
    ]


def measure_steps(
    directory: Path, server: Server, backlog: int, rounds: int, steps: int
) -> tuple[list[Variant], dict[str, Any]]:
    """Interleave the variants, their order changing from round to round."""
    torch.manual_seed(0)
    model = own_client().make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(VOCABULARY, (1, SEQUENCE + 1))
    variants = make_variants(server)
    with uploading_daemon(directory, server, "beside", backlog) as running:
        server.halt()
        server.answered_s = 0.0
        before = uploaded_nbytes(running)
        for number in range(rounds):
            for variant in variants[:: 1 if number % 2 else -1]:
                variant.run_block(model, optimizer, tokens, steps)
        counters = {"beside_mb_per_s": (uploaded_nbytes(running) - before) / 1e6 / server.answered_s}
        server.go()
        found = manifest_of(server, "beside")
        counters |= capd_client.counters()
        capd_client.close()
    if found is not None and found.is_complete:
        raise SystemExit("everything was uploaded before the end; give a larger --backlog-mib")
    return variants, counters


def show(result: dict[str, Any], variants: list[Variant]) -> None:
    """Print the tables and the verdicts."""
    rate, counters = result["rate"], result["counters"]
    print(
        f"upload alone: {rate['mb']:.0f} MB, {rate['mb_per_cpu_s']:.0f} MB per CPU second of the daemon, "
        f"{rate['mb_per_s']:.0f} MB/s; {rate['peak_anonymous_mib']:.0f} MiB anonymous at most"
    )
    for variant in variants:
        print(f"{variant.name:9s} wall s per step {spread(variant.wall_s)}, CPU {spread(variant.cpu_s)}")
    dropped = sum(counters["dropped"].values())
    print(f"beside the job {counters['beside_mb_per_s']:.0f} MB/s went up")
    print(f"{counters['offered']} offered, {counters['committed']} committed, {dropped} dropped")
    for name, value, bound in (
        ("uploading / alone, wall x", result["wall_ratio"], MUST),
        ("dropped captures", dropped, 0),
    ):
        print(f"{name}: {value:.3f}, bound {bound}: {'met' if value <= bound else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each variant in each round")
    parser.add_argument("--server", choices=["sink", "seaweedfs"], default="sink", help="of the second part")
    parser.add_argument("--backlog-mib", type=int, default=3072, help="sealed shards that go up")
    parser.add_argument(
        "--directory", type=Path, help="where the stores and the server's data go (default: the system's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with seaweedfs(args.directory) as server:
        rate = measure_rate(args.directory, server, args.backlog_mib << 20)
    with sink() if args.server == "sink" else seaweedfs(args.directory) as server:
        variants, counters = measure_steps(
            args.directory, server, args.backlog_mib << 20, args.rounds, args.steps
        )
    alone, beside = variants
    result = {
        "machine": machine(),
        "rounds": args.rounds,
        "steps_per_round": args.steps,
        "rate": rate,
        "wall_ratio": 1 + beside.above(alone, alone)[1],
        "cpu_ratio": 1 + beside.above(alone, alone)[0],
        "wall_s": {variant.name: variant.wall_s for variant in variants},
        "counters": counters,
    }
    show(result, variants)
    report(result, args.json)


if __name__ == "__main__":
    main()
