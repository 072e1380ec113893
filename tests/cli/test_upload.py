"""`capd upload`: runs go up without a daemon, once or as another process writes them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.daemon import wait_for
from tests.kit.objects.faults import INTERNAL_ERROR, Faults
from tests.kit.objects.proxy import FaultProxy
from tests.kit.objects.published import assert_same_files, manifest_of
from tests.kit.objects.service import Bucket
from tests.kit.objects.signing import SECRET_KEY
from tests.kit.objects.uploading import PREFIX, filled_run, serve, upload_of, uploaded_all
from tests.kit.store.cli import run_capd


def test_a_run_goes_up_once_and_a_second_time_nothing(tmp_path: Path, bucket: Bucket) -> None:
    run = filled_run(tmp_path).run
    to = bucket.url(PREFIX)
    first = run_capd("upload", run, to, **bucket.environment())
    second = run_capd("upload", run, to, "--json", **bucket.environment())

    assert (first.code, second.code) == (0, 0), first.err
    assert f"{to}/run.zarr (node n): " in first.out
    [found] = json.loads(second.out)
    assert (found["objects"], found["bytes"], found["complete"], found["written"]) == (0, 0, True, True)
    assert_same_files(bucket, f"{PREFIX}/run.zarr", run)


def test_what_went_up_reads_as_the_local_run_and_is_sound(tmp_path: Path, bucket: Bucket) -> None:
    run, there = filled_run(tmp_path).run, bucket.url(f"{PREFIX}/run.zarr")
    assert run_capd("upload", run, bucket.url(PREFIX), **bucket.environment()).code == 0
    verified = run_capd("verify", there, **bucket.environment())

    assert verified.code == 0, verified.out + verified.err
    listed = [run_capd("ls", place, "--json", **bucket.environment()).json for place in (run, there)]
    assert listed[0] == listed[1]
    assert len(listed[0]) == 4


def test_a_copy_of_an_uploaded_run_is_not_uploaded_itself(tmp_path: Path, bucket: Bucket) -> None:
    run = filled_run(tmp_path).run
    assert run_capd("upload", run, bucket.url(PREFIX), **bucket.environment()).code == 0
    assert run_capd("cp", run, tmp_path / "copy.zarr").code == 0

    assert list(run.glob(".capd/node=n/remote.json"))
    assert list(run.glob(".capd/node=n/upload/*"))
    assert sorted(path.name for path in (tmp_path / "copy.zarr" / ".capd" / "node=n").iterdir()) == [
        "catalog.sqlite",
    ]


def test_a_directory_of_runs_goes_up_to_the_address_of_the_settings(tmp_path: Path, bucket: Bucket) -> None:
    for name in ("a", "b"):
        filled_run(tmp_path, run_id=name, records=1)
    found = run_capd("upload", tmp_path, CAPD_UPLOAD_TO=bucket.url(PREFIX), **bucket.environment())

    assert found.code == 0, found.err
    for name in ("a", "b"):
        assert_same_files(bucket, f"{PREFIX}/{name}.zarr", tmp_path / f"{name}.zarr")


def test_a_dry_run_counts_and_changes_nothing(tmp_path: Path, bucket: Bucket) -> None:
    run = filled_run(tmp_path).run
    found = run_capd("upload", run, bucket.url(PREFIX), "--dry-run", "--json", **bucket.environment())

    [document] = json.loads(found.out)
    shards = [path for path in run.glob("*/*/*/*/*/data/c/**/*") if path.is_file()]
    assert (document["objects"], document["bytes"]) == (
        len(shards),
        sum(path.stat().st_size for path in shards),
    )
    assert document["written"] is False
    assert bucket.keys() == []
    assert not list(run.glob(".capd/*/remote.json"))


def test_every_third_request_fails_and_the_upload_succeeds(
    tmp_path: Path, bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    run = filled_run(tmp_path, series=6).run
    fault_proxy.faults = Faults(every=3, answer=INTERNAL_ERROR)
    found = run_capd("upload", run, bucket.url(PREFIX), **bucket.through(fault_proxy).environment())

    assert found.code == 0, found.err
    assert sum(one.status == 500 for one in fault_proxy.requests) > 3
    assert_same_files(bucket, f"{PREFIX}/run.zarr", run)


def test_watch_follows_a_store_that_grows_until_ctrl_c(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    filled_run(tmp_path, run_id="old", records=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "capd", "upload", str(tmp_path), bucket.url(PREFIX), "--watch"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        uploaded_all(bucket, "old")
        new = filled_run(tmp_path, run_id="new", records=1).run
        uploaded_all(bucket, "new")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()

    assert process.returncode == 130
    # The signal may come before the line about the newer run.
    assert "old.zarr: " in said
    assert_same_files(bucket, f"{PREFIX}/new.zarr", new)


def test_beside_a_daemon_that_uploads_to_the_same_place_it_is_refused(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = filled_run(tmp_path / "s", records=1).run
    daemon = serve(tmp_path / "s", tmp_path / "c.sock", bucket)
    try:
        wait_for(lambda: upload_of(daemon), "the daemon uploads")
        environ = {**bucket.environment(), "CAPD_ENDPOINT": f"unix:{tmp_path / 'c.sock'}"}
        found = run_capd("upload", run, bucket.url(PREFIX), **environ)
        stats = run_capd("stats", tmp_path / "s", CAPD_ENDPOINT=environ["CAPD_ENDPOINT"])
    finally:
        daemon.stop()

    assert found.code == 7
    assert f"the daemon with pid {daemon.process.pid} uploads" in found.err
    assert stats.code == 0


def test_another_store_has_the_place(tmp_path: Path, bucket: Bucket) -> None:
    first, second = filled_run(tmp_path / "a").run, filled_run(tmp_path / "b", series=5).run
    assert run_capd("upload", first, bucket.url(PREFIX), **bucket.environment()).code == 0
    found = run_capd("upload", second, bucket.url(PREFIX), **bucket.environment())

    assert found.code == 7
    assert "has another writer" in found.err
    assert_same_files(bucket, f"{PREFIX}/run.zarr", first)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "give an ADDRESS"),
        (("nothing://x",), 2, "is no address of an object store"),
        (("s3://bucket/x", "--watch", "--json"), 2, "--watch goes with neither"),
    ],
)
def test_wrong_words_are_usage_errors(tmp_path: Path, words: tuple[str, ...], code: int, said: str) -> None:
    found = run_capd("upload", tmp_path, *words)

    assert (found.code, said in found.err) == (code, True)


def test_an_empty_directory_has_nothing_to_upload(tmp_path: Path, bucket: Bucket) -> None:
    assert run_capd("upload", tmp_path, bucket.url(), **bucket.environment()).code == 5


def test_doctor_tells_what_the_object_store_does_and_never_a_key(tmp_path: Path, bucket: Bucket) -> None:
    environ = {**bucket.environment(), "CAPD_UPLOAD_TO": bucket.url(PREFIX), "CAPD_STORE": str(tmp_path)}
    good = run_capd("doctor", "--quick", "--json", **environ)
    bad = run_capd("doctor", "--quick", "--json", **{**environ, "AWS_SECRET_ACCESS_KEY": "wrong-secret"})
    shown = run_capd("config", "show", **environ)

    checks = {one["name"]: one for one in json.loads(good.out)["checks"]}
    assert checks["upload"]["status"] == "ok"
    assert "conditional writes are enforced" in checks["upload"]["detail"]
    assert checks["upload rule"]["status"] == "warn"
    [failed] = [one for one in json.loads(bad.out)["checks"] if one["name"] == "upload"]
    assert (failed["status"], "secret key" in failed["detail"]) == ("fail", True)
    assert bucket.keys() == []
    for text in (good.out, good.err, bad.out, bad.err, shown.out, shown.err):
        assert SECRET_KEY not in text
        assert "wrong-secret" not in text
    assert manifest_of(bucket, f"{PREFIX}/run.zarr") is None
