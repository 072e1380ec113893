"""What a killed daemon leaves in its spool, as the commands show it until the next daemon takes it up."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.recorder.test_holding import K, SteppingRank, serve
from tests.kit.daemon import daemons, wait_for
from tests.kit.store.cli import run_capd

PLACES = {
    "in-the-run": {"memory": "0"},
    "in-memory": {"memory": '"1MiB"'},
    "elsewhere": {"memory": "0", "directory": '"{}/other"'},
}
ADVICE = "start the daemon with [window] again"


@pytest.mark.parametrize("settings", PLACES.values(), ids=PLACES)
def test_the_spool_is_shown_until_the_next_daemon_has_it(tmp_path: Path, settings: dict[str, str]) -> None:
    run = tmp_path / "store" / "run.zarr"
    settings = {name: value.format(tmp_path) for name, value in settings.items()}
    (tmp_path / "other").mkdir(mode=0o700)
    with daemons() as made:
        made.append(daemon := serve(tmp_path, **settings))
        rank = SteppingRank(daemon.path)
        rank.connect()
        for iteration in range(6):
            rank.step(iteration)
        wait_for(lambda: daemon.run_stats("run")["window"]["iterations"] <= K, "old iterations leave")
        live = run_capd("stats", run, "--json", CAPD_ENDPOINT=f"unix:{daemon.path}").json
        assert (live["source"], live["window"]["held_records"], live["window"]["first"]) == ("daemon", 12, 2)
        assert (
            "iterations 2 to 5 held, 12 records"
            in run_capd("stats", run, CAPD_ENDPOINT=f"unix:{daemon.path}").out
        )
        assert ADVICE not in run_capd("verify", run).err

        daemon.stop(signal.SIGKILL)
        rank.disconnect()
        left = run_capd("stats", run, "--json", CAPD_ENDPOINT=f"unix:{tmp_path}/none").json
        assert left["source"] == "store"
        for name in ("iterations", "first", "last", "memory_bytes", "disk_bytes", "held_bytes"):
            assert left["window"][name] == live["window"][name], name
        found = run_capd("verify", run)
        assert (found.code, found.err.count(ADVICE)) == (0, 1)
        copied = run_capd("cp", run, tmp_path / "copy.zarr")
        assert copied.code in (0, 5), copied.err
        assert not list((tmp_path / "copy.zarr").rglob("*.held"))

        # It also finds what is held in the directory of an earlier setting.
        made.append(daemon := serve(tmp_path, 1, **{**settings, "directory": f'"{tmp_path}"'}))
        rank.path = daemon.path
        rank.connect()
        rank.disconnect()
        rank.close()
        assert daemon.stop() == 0
    ended = run_capd("stats", run, "--json", CAPD_ENDPOINT=f"unix:{tmp_path}/none").json
    assert (ended["committed"], ended["window"]["iterations"], ended["window"]["keeps_total"]) == (12, 0, 1)
    [keep] = ended["window"]["keeps"]
    assert (keep["first"], keep["iteration"], keep["node"]) == (2, 5, "n")
    found = run_capd("verify", run)
    assert (found.code, found.err) == (0, "")
