"""`capd doctor`: findings with remedies, and a real round trip of every dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.key import Moment
from tests.kit.store.cli import Result, StoreWriter, linear_key
from tests.kit.store.keeping import leave_held

Capd = Callable[..., Result]


def test_every_dtype_makes_the_round_trip(capd: Capd, tmp_path: Path) -> None:
    found = capd("doctor", "--json", cwd=tmp_path)

    assert found.json["dtypes"] == {name: "ok" for name in ITEM_NBYTES if hasattr(torch, name)}
    assert {check["name"] for check in found.json["checks"]} >= {
        "versions", "kernel", "endpoint", "arena", "cpus", "open files", "rank", "store", "round trip",
    }  # fmt: skip
    assert found.json["ok"] == (found.code == 0)


def test_an_endpoint_that_does_not_answer_fails_with_the_remedy(capd: Capd, tmp_path: Path) -> None:
    found = capd("doctor", "--quick", cwd=tmp_path, CAPD_ENDPOINT=f"unix:{tmp_path}/none.sock")

    assert found.code == 1
    assert f"fail  endpoint: no daemon at {tmp_path}/none.sock" in found.out
    assert "→ start `capd serve`" in found.out


def test_an_endpoint_path_that_is_too_long_fails_naming_the_limit(capd: Capd, tmp_path: Path) -> None:
    found = capd("doctor", "--quick", "--json", cwd=tmp_path, CAPD_ENDPOINT=f"unix:/tmp/{'x' * 120}")

    assert found.code == 1
    endpoint = next(check for check in found.json["checks"] if check["name"] == "endpoint")
    assert (endpoint["status"], "107" in endpoint["detail"]) == ("fail", True)


def test_a_store_that_cannot_be_written_fails(capd: Capd, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    found = capd("doctor", "--quick", cwd=tmp_path, CAPD_STORE=str(tmp_path / "file" / "store"))

    assert found.code == 1
    assert "fail  store:" in found.out


def test_the_rank_source_is_named(capd: Capd, tmp_path: Path) -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}

    assert "rank 3 of 8 (from env RANK)" in capd("doctor", "--quick", cwd=tmp_path, **environ).out


def test_the_quota_of_the_newest_run_is_told_for_this_node(capd: Capd, tmp_path: Path) -> None:
    assert " quota: " not in capd("doctor", "--quick", cwd=tmp_path).out
    writer = StoreWriter(tmp_path / "store")
    writer.put("run", linear_key(), np.zeros((64, 64), "f4"), "float32", Moment(iteration=0))
    writer.close()
    environ = {"CAPD_STORE": str(tmp_path / "store"), "CAPD_NODE": "node0", "CAPD_SERIES_MAX": "1GB"}

    found = capd("doctor", "--quick", cwd=tmp_path, CAPD_RUN_MAX="1GB", **environ).out
    assert "ok    quota: run_max 953.7 MiB, series_max 953.7 MiB; the newest run, run, holds" in found
    found = capd("doctor", "--quick", cwd=tmp_path, CAPD_RUN_MAX="100B", **environ).out
    assert "warn  quota: run_max 100 B" in found
    assert "→ raise CAPD_RUN_MAX before the run goes on, or begin another run" in found
    found = capd("doctor", "--quick", cwd=tmp_path, CAPD_RUN_MAX="100B", **{**environ, "CAPD_NODE": "n1"}).out
    assert "holds 0 B on this node (0%)" in found


def test_a_run_that_cannot_be_read_does_not_end_the_checks(capd: Capd, tmp_path: Path) -> None:
    (tmp_path / "store" / "other.zarr").mkdir(parents=True)
    (tmp_path / "store" / "other.zarr" / "zarr.json").write_text("{}")

    found = capd("doctor", "--quick", cwd=tmp_path, CAPD_STORE=str(tmp_path / "store"), CAPD_RUN_MAX="1GB")
    assert "the newest run, other, cannot be read: " in found.out


def test_the_place_of_the_recorder_is_checked_and_a_killed_daemons_spool_is_told(
    capd: Capd, tmp_path: Path
) -> None:
    assert " recorder: " not in capd("doctor", "--quick", cwd=tmp_path).out
    writer = StoreWriter(tmp_path / "captures")
    writer.put("run", linear_key(), np.zeros((4, 4), "f4"), "float32", Moment(iteration=0))
    writer.close()
    environ = {
        "CAPD_NODE": "node0",
        "CAPD_WINDOW_ITERATIONS": "8",
        "CAPD_WINDOW_BYTES": "2MiB",
        "COLUMNS": "500",
    }
    found = capd("doctor", "--quick", cwd=tmp_path, **environ)
    assert "ok    recorder: 8 iterations in 2.0 MiB" in found.out
    assert "held records" not in found.out

    leave_held(tmp_path / "captures" / "run.zarr", "node0", 7, 5000)
    found = capd("doctor", "--quick", cwd=tmp_path, **environ)
    assert "warn  held records: run: 5,000 B of iteration 7 are held by a flight recorder" in found.out
    assert "→ start the daemon with [window] again: it stores what was asked for" in found.out
    found = capd("doctor", "--quick", cwd=tmp_path, **{**environ, "CAPD_WINDOW_BYTES": "900TB"})
    assert found.code == 1
    assert "fail  recorder: 8 iterations in" in found.out
    assert "→ [window] bytes:" in found.out
