"""A daemon that is killed at each step of an upload: readers see the manifest before or after, and nothing is lost."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from capd.store.disk.failpoints import NAMES
from tests.kit.daemon import DaemonProcess, wait_for
from tests.kit.objects.proxy import FaultProxy
from tests.kit.objects.published import assert_published, assert_same_files, manifest_of, series_in
from tests.kit.objects.service import Bucket
from tests.kit.objects.signing import signed_request
from tests.kit.objects.uploading import PREFIX, serve, uploaded_all
from tests.kit.store.writing import Writer, key
from tests.kit.tiers import rows

RUN = f"{PREFIX}/run.zarr"
POINTS = [name for name in NAMES if name.startswith("upload.")]
QUICK = (
    "upload.after_shard", "upload.after_attributes", "upload.after_series", "upload.after_manifest",
    "upload.before_delete",
)  # fmt: skip


def go_on(root: Path, first: int, records: int = 2) -> Path:
    """The run with some records more: the last shard of each series is continued, and one series is new."""
    writer = Writer(root, node="n")
    writer.sequence = 1000 * first
    for step in range(first, first + records):
        for number in range(3):
            values = np.random.default_rng(1000 * step + number).standard_normal((300, 300)).astype("<f4")
            writer.put(key("input", layer=number), "float32", values, iteration=step)
        writer.put(key("bias"), "float32", np.full((8,), step, "<f4"), iteration=step)
    writer.put(key("extra", layer=first), "float32", np.ones((300, 300), "<f4"), iteration=first)
    writer.close()
    return writer.run


def upload_all(root: Path, socket: Path, bucket: Bucket, made: list[DaemonProcess]) -> None:
    """Let a daemon upload everything and stop."""
    catalog = root / "run.zarr" / ".capd" / "node=n" / "catalog.sqlite"
    since_ns = catalog.stat().st_mtime_ns
    made.append(serve(root, socket, bucket))
    uploaded_all(bucket)
    wait_for(lambda: made_after(bucket, since_ns), "the newest manifest")
    assert made[-1].stop() == 0, made[-1].text()


def made_after(bucket: Bucket, since_ns: int) -> bool:
    found = manifest_of(bucket, RUN, "n")
    return found is not None and found.is_complete and found.written_ns > since_ns


def shard_puts(proxy: FaultProxy) -> Counter[str]:
    """How often each shard arrived whole."""
    return Counter(
        unquote(one.path)
        for one in proxy.requests
        if one.method == "PUT"
        and "/data/c/" in one.path
        and one.status == 200
        and "partNumber" not in one.query
    )


@pytest.mark.parametrize("point", rows(POINTS, QUICK))
def test_a_kill_at_any_step_leaves_what_the_manifest_names_and_the_next_daemon_completes_it(
    tmp_path: Path, made: list[DaemonProcess], bucket: Bucket, fault_proxy: FaultProxy, point: str
) -> None:
    root, through = tmp_path / "s", bucket.through(fault_proxy)
    for first in (0, 2):
        run = go_on(root, first)
        upload_all(root, tmp_path / "c.sock", through, made)
    before = manifest_of(bucket, RUN, "n")
    assert before is not None
    go_on(root, 4)
    began_in_vain(bucket, run)
    fault_proxy.clear()
    killed = serve(
        root, tmp_path / "k.sock", through, environ={"CAPD_FAILPOINTS": f"{point}=kill"}, wait=False
    )
    made.append(killed)
    assert killed.process.wait(60) == -signal.SIGKILL

    between = assert_published(bucket, RUN, run, "n")
    assert between is not None
    assert between.generation in (before.generation, before.generation + 1)
    upload_all_again(root, tmp_path / "c.sock", through, made)

    after = assert_published(bucket, RUN, run, "n")
    assert after is not None
    assert (after.is_complete, len(after.records)) == (True, 1)
    assert_same_files(bucket, RUN, run)
    # Two daemons with four threads each: at most one shard of those that a kill cut off arrived twice.
    twice = {path: count for path, count in shard_puts(fault_proxy).items() if count > 1}
    assert len(twice) <= 1, twice
    assert bucket.uploads() == []
    if leftovers(bucket):
        # A kill between manifest and deletion: the next manifest makes up for it.
        go_on(root, 6)
        upload_all(root, tmp_path / "c.sock", through, made)
    assert leftovers(bucket) == set()
    assert all(
        sum(part.records for part in one.parts) == one.row.records for one in series_in(bucket, RUN, "n")[0]
    )


def began_in_vain(bucket: Bucket, run: Path) -> None:
    """An upload in parts that an earlier kill left."""
    shard = min(run.glob("*/rank0/layer0/*/*/data/c/0/0/0"))
    path = f"/{bucket.name}/{RUN}/{shard.relative_to(run)}"
    signed_request(bucket.service.endpoint, "POST", path, [("uploads", "")])
    assert len(bucket.uploads()) == 1


def upload_all_again(root: Path, socket: Path, bucket: Bucket, made: list[DaemonProcess]) -> None:
    made.append(serve(root, socket, bucket))
    run = root / "run.zarr"
    since_ns = (run / ".capd" / "node=n" / "catalog.sqlite").stat().st_mtime_ns
    wait_for(lambda: made_after(bucket, since_ns), "everything is uploaded", 60)
    wait_for(lambda: not bucket.uploads(), "unfinished uploads are aborted")
    assert made[-1].stop() == 0, made[-1].text()


def leftovers(bucket: Bucket) -> set[str]:
    """Segments of before the last manifest but one: those of that one stay for readers that hold it."""
    manifest = manifest_of(bucket, RUN, "n")
    assert manifest is not None
    named = {manifest.series.name, *(one.name for one in manifest.records), "manifest.json", "origin-n"}
    found = {os.path.basename(name) for name in bucket.keys(f"{RUN}/.capd")} - named
    generations = sorted({int(name.split("-")[1].split(".")[0]) for name in found})
    return found if len(generations) > 1 else set()
