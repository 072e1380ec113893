"""A daemon that uploads: new alerts go up, also those of a run that was complete before, and superseded ones go."""

from __future__ import annotations

from pathlib import Path

from capd.store.objects.address import parse_address
from capd.store.read.store import open_store
from tests.kit.daemon import DaemonProcess, wait_for
from tests.kit.objects.published import assert_published, manifest_of
from tests.kit.objects.service import Bucket
from tests.kit.objects.uploading import PREFIX, filled_run, serve, uploaded_all
from tests.kit.store.alerting import alert, give_alerts

RUN = f"{PREFIX}/run.zarr"


def test_new_alerts_of_a_complete_run_go_up(
    tmp_path: Path, made: list[DaemonProcess], bucket: Bucket
) -> None:
    run = filled_run(tmp_path / "s").run
    daemon = serve(tmp_path / "s", tmp_path / "c.sock", bucket)
    made.append(daemon)
    uploaded_all(bucket)
    first = manifest_of(bucket, RUN, "n")
    assert first is not None
    assert first.alerts is None
    place = parse_address(bucket.url(RUN))
    for number in (1, 2):
        give_alerts(run, "n", alert(number))
        wait_for(lambda n=number: len(open_store(place).alerts) == n, "the alerts go up")  # type: ignore[misc]
    last = manifest_of(bucket, RUN, "n")
    assert last is not None
    assert last.alerts is not None
    assert (last.alerts.rows, last.generation, last.series) == (2, first.generation + 2, first.series)
    assert open_store(place).alerts == [alert(1), alert(2)]
    assert daemon.stop() == 0
    assert_published(bucket, RUN, run, "n")
