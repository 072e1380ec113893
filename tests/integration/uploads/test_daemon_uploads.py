"""A daemon that uploads to a real S3 server: what it makes of runs, of stops, and of a server that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit.daemon import DaemonProcess, Rank, wait_for
from tests.kit.objects.faults import CLOCK_SKEW, INTERNAL_ERROR, INVALID_KEY, STORAGE_FULL, Faults
from tests.kit.objects.proxy import FaultProxy
from tests.kit.objects.published import assert_published, assert_same_files, assert_zarr_reads_it, manifest_of
from tests.kit.objects.server import S3Server
from tests.kit.objects.service import Bucket
from tests.kit.objects.signing import SECRET_KEY
from tests.kit.objects.uploading import PREFIX, filled_run, serve, upload_of, uploaded_all

RUN = f"{PREFIX}/run.zarr"


def test_live_runs_and_those_of_earlier_daemons_go_up_and_readers_agree(
    tmp_path: Path, made: list[DaemonProcess], bucket: Bucket
) -> None:
    old = filled_run(tmp_path / "s", run_id="old").run
    daemon = serve(tmp_path / "s", tmp_path / "c.sock", bucket, environ={"CAPD_IDLE_SEAL_S": "0.2"})
    made.append(daemon)
    rank = Rank(tmp_path / "c.sock")
    rank.connect()
    rank.put(*range(1, 6))
    rank.expect_acks(*range(1, 6))
    rank.count(offered=5)
    rank.bye()
    rank.close()
    uploaded_all(bucket, "old")
    uploaded_all(bucket, "run")

    found = upload_of(daemon)
    assert (found["state"], found["problem"], found["note"], found["backlog_bytes"]) == ("ok", "", "", 0)
    assert sum(found["failures"].values()) == 0
    assert daemon.stop() == 0
    for name in ("old", "run"):
        local = tmp_path / "s" / f"{name}.zarr"
        assert_published(bucket, f"{PREFIX}/{name}.zarr", local, "n")
        assert_same_files(bucket, f"{PREFIX}/{name}.zarr", local)
    assert assert_zarr_reads_it(bucket, f"{PREFIX}/old.zarr", old) == 4


def test_uploads_give_way_while_a_rank_is_there(
    tmp_path: Path, made: list[DaemonProcess], bucket: Bucket
) -> None:
    """At the pace beside a rank, the run would take a minute."""
    limits = {"CAPD_UPLOAD_LIVE_BANDWIDTH": "64KiB"}
    daemon = serve(tmp_path / "s", tmp_path / "c.sock", bucket, environ=limits)
    made.append(daemon)
    rank = Rank(tmp_path / "c.sock", run_id="other")
    rank.connect()
    filled_run(tmp_path / "before", run_id="run").run.rename(tmp_path / "s" / "run.zarr")
    wait_for(lambda: upload_of(daemon)["backlog_bytes"] > 0, "the upload begins")
    time.sleep(2.0)
    slow = manifest_of(bucket, RUN, "n")
    assert slow is None or not slow.is_complete
    rank.bye()
    rank.close()

    uploaded_all(bucket, timeout_s=30.0)
    assert daemon.stop() == 0
    assert_same_files(bucket, RUN, tmp_path / "s" / "run.zarr")


def test_only_the_runs_of_the_pattern_go_up(
    tmp_path: Path, made: list[DaemonProcess], bucket: Bucket
) -> None:
    filled_run(tmp_path / "s", run_id="exp1", records=1)
    filled_run(tmp_path / "s", run_id="other", records=1)
    made.append(serve(tmp_path / "s", tmp_path / "c.sock", bucket, environ={"CAPD_UPLOAD_RUNS": "exp*"}))
    uploaded_all(bucket, "exp1")
    assert made[0].stop() == 0

    assert manifest_of(bucket, f"{PREFIX}/other.zarr", "n") is None


def test_a_stopping_daemon_drains_its_uploads_if_it_may(
    tmp_path: Path, made: list[DaemonProcess], bucket: Bucket
) -> None:
    daemon = serve(tmp_path / "s", tmp_path / "c.sock", bucket, "--drain-uploads", "60")
    made.append(daemon)
    rank = Rank(tmp_path / "c.sock")
    rank.connect()
    rank.put(1, 2, 3)
    rank.expect_acks(1, 2, 3)
    rank.bye()
    rank.close()

    assert daemon.stop() == 0
    manifest = assert_published(bucket, RUN, tmp_path / "s" / "run.zarr", "n")
    assert manifest is not None
    assert manifest.is_complete
    assert_same_files(bucket, RUN, tmp_path / "s" / "run.zarr")


def test_a_server_that_hangs_does_not_hold_up_the_stop(
    tmp_path: Path, made: list[DaemonProcess], bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    filled_run(tmp_path / "s")
    fault_proxy.faults = Faults(concerns=lambda request: request.method == "PUT", delay_s=30)
    daemon = serve(tmp_path / "s", tmp_path / "c.sock", bucket.through(fault_proxy))
    made.append(daemon)
    wait_for(lambda: any(one.method == "PUT" for one in fault_proxy.requests), "an upload hangs")
    daemon.process.send_signal(signal.SIGTERM)

    assert daemon.process.wait(15) == 0


def test_the_upload_goes_on_when_the_server_comes_back(
    tmp_path: Path, made: list[DaemonProcess], own_s3_server: S3Server
) -> None:
    bucket = own_s3_server.make_bucket()
    run = filled_run(tmp_path / "s").run
    own_s3_server.stop()
    daemon = serve(tmp_path / "s", tmp_path / "c.sock", bucket)
    made.append(daemon)
    wait_for(lambda: upload_of(daemon)["failures"]["unreachable"] > 1, "failures are counted", 90)
    found = upload_of(daemon)
    assert found["state"] == "retrying"
    assert "does not answer" in found["problem"]
    rank = Rank(tmp_path / "c.sock", run_id="new")
    rank.connect()
    rank.put(1, 2)
    rank.expect_acks(1, 2)
    rank.bye()
    rank.close()
    own_s3_server.start()
    uploaded_all(bucket)

    assert_same_files(bucket, RUN, run)
    assert daemon.text().count("does not answer") == 1
    assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("faults", "reason", "said"),
    [
        (Faults(every=1, answer=INVALID_KEY), "refused", "does not know the access key"),
        (Faults(every=1, answer=CLOCK_SKEW), "refused", "clock"),
        (Faults(concerns=lambda one: one.writes_object and "probe" not in one.path, every=1, answer=STORAGE_FULL),
         "full", "the bucket is full"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line_and_captures_go_on(
    tmp_path: Path, made: list[DaemonProcess], bucket: Bucket, fault_proxy: FaultProxy, faults: Faults, reason: str,
    said: str,
) -> None:  # fmt: skip
    run = filled_run(tmp_path / "s").run
    fault_proxy.faults = faults
    daemon = serve(tmp_path / "s", tmp_path / "c.sock", bucket.through(fault_proxy))
    made.append(daemon)
    wait_for(lambda: upload_of(daemon)["failures"][reason], "the failure is counted")
    rank = Rank(tmp_path / "c.sock", run_id="new")
    rank.connect()
    rank.put(1, 2)
    rank.expect_acks(1, 2)
    rank.bye()
    rank.close()
    found = upload_of(daemon)

    assert said in found["problem"]
    assert found["state"] == ("failed" if reason == "refused" else "retrying")
    assert daemon.text().count(said) == 1
    assert manifest_of(bucket, RUN, "n") is None
    assert daemon.stop() == 0
    assert any(run.rglob("data/c/**/*"))
    assert SECRET_KEY not in daemon.text()
    assert SECRET_KEY not in str(found)


def test_of_two_stores_on_one_node_name_the_second_stops_with_the_reason(
    tmp_path: Path, made: list[DaemonProcess], bucket: Bucket
) -> None:
    first = filled_run(tmp_path / "a").run
    filled_run(tmp_path / "b", records=2, series=5)
    made.append(serve(tmp_path / "a", tmp_path / "a.sock", bucket))
    uploaded_all(bucket)
    second = serve(tmp_path / "b", tmp_path / "b.sock", bucket)
    made.append(second)
    wait_for(lambda: upload_of(second)["state"] == "failed", "the second daemon notices")

    assert "has another writer" in upload_of(second)["problem"]
    assert "set another `node`" in second.text()
    assert second.stop() == 0
    assert_published(bucket, RUN, first, "n")
    assert_same_files(bucket, RUN, first)


@pytest.mark.parametrize("conditional", ["strip", "refuse"])
def test_a_store_without_conditional_writes_is_named_once_and_used(
    tmp_path: Path, made: list[DaemonProcess], bucket: Bucket, fault_proxy: FaultProxy, conditional: str
) -> None:
    run = filled_run(tmp_path / "s").run
    fault_proxy.faults = Faults(conditional=conditional)
    daemon = serve(tmp_path / "s", tmp_path / "c.sock", bucket.through(fault_proxy))
    made.append(daemon)
    uploaded_all(bucket)

    assert "does not enforce conditional writes" in upload_of(daemon)["note"]
    assert daemon.text().count("does not enforce conditional writes") == 1
    assert_same_files(bucket, RUN, run)
    assert daemon.stop() == 0


@pytest.mark.parametrize("address", ["s5://bucket/x", "s3://bucket/run.zarr", "s3:bucket"])
def test_an_address_that_is_none_stops_the_start_in_one_line(tmp_path: Path, address: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "capd", "serve", "--store", str(tmp_path / "s"), "--upload-to", address],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip

    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--upload-to" in done.stderr
    assert not (tmp_path / "s").exists()


def test_without_the_extra_the_start_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "obstore.py").write_text("raise ImportError('no obstore here')\n")
    done = subprocess.run(
        [sys.executable, "-m", "capd", "serve", "--store", str(tmp_path / "s"), "--upload-to", "s3://bucket/x"],
        capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip

    assert done.returncode == 1
    assert 'pip install "capd[store]"' in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_failure_is_one_line_beside_a_run_with_nothing_to_upload(
    tmp_path: Path, made: list[DaemonProcess], bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    filled_run(tmp_path / "s", run_id="done", records=1)
    daemon = serve(tmp_path / "s", tmp_path / "c.sock", bucket.through(fault_proxy))
    made.append(daemon)
    uploaded_all(bucket, "done")
    fault_proxy.faults = Faults(every=1, answer=INTERNAL_ERROR)
    filled_run(tmp_path / "s", run_id="new", records=1)
    wait_for(lambda: upload_of(daemon)["failures"]["unreachable"] > 2, "the store fails three times")
    assert upload_of(daemon)["state"] == "retrying"
    fault_proxy.faults = Faults()
    uploaded_all(bucket, "new")
    assert daemon.stop() == 0

    assert daemon.text().count("uploads are tried again") == 1
    assert daemon.text().count("go on") == 1


def test_a_state_that_cannot_be_read_is_said_with_the_remedy(
    tmp_path: Path, made: list[DaemonProcess], bucket: Bucket
) -> None:
    state = filled_run(tmp_path / "s", records=1).run / ".capd" / "node=n" / "remote.json"
    state.write_text("{")
    daemon = serve(tmp_path / "s", tmp_path / "c.sock", bucket)
    made.append(daemon)
    wait_for(lambda: upload_of(daemon)["failures"]["other"], "the failure is counted")
    problem = upload_of(daemon)["problem"]
    assert (str(state) in problem, "delete the file" in problem) == (True, True)
    state.unlink()
    uploaded_all(bucket)
    assert daemon.stop() == 0

    assert daemon.text().count("delete the file") == 1


def test_no_thread_of_an_upload_has_a_lower_priority_than_the_pipeline(
    tmp_path: Path, made: list[DaemonProcess], bucket: Bucket
) -> None:
    filled_run(tmp_path / "s", records=1)
    daemon = serve(tmp_path / "s", tmp_path / "c.sock", bucket)
    made.append(daemon)
    uploaded_all(bucket)

    # A thread that holds the interpreter's lock and gets no turn would hold up the captures.
    threads = Path(f"/proc/{daemon.process.pid}/task").glob("*/stat")
    priorities = [int(one.read_text().rpartition(")")[2].split()[16]) for one in threads]
    assert len(priorities) > 2
    assert max(priorities) == 10


def test_a_run_that_the_store_fails_does_not_hold_up_the_others(
    tmp_path: Path, made: list[DaemonProcess], bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    for name in ("a", "b", "c"):
        filled_run(tmp_path / "s", run_id=name, records=1)
    fault_proxy.faults = Faults(
        concerns=lambda request: "/a.zarr/" in request.path, every=1, answer=INTERNAL_ERROR
    )
    daemon = serve(tmp_path / "s", tmp_path / "c.sock", bucket.through(fault_proxy))
    made.append(daemon)
    uploaded_all(bucket, "b")
    uploaded_all(bucket, "c")
    failures = upload_of(daemon)["failures"]["unreachable"]
    wait_for(lambda: upload_of(daemon)["failures"]["unreachable"] > failures + 1, "it is tried again")
    assert daemon.text().count("uploads are tried again") == 1
    fault_proxy.faults = Faults()
    uploaded_all(bucket, "a")
    assert daemon.stop() == 0
