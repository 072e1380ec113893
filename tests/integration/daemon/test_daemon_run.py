"""`capd run`: the job comes first; daemon, environment, signals, exit codes and summary around it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import forking
from tests.kit.daemon import DaemonProcess, stored_payloads, wait_for
from tests.kit.paths import REPOSITORY
from tests.kit.processes import command_line
from tests.kit.tiers import rows

HERE = str(REPOSITORY)
CAPTURING_JOB = f"""
    import json, os, sys
    sys.path.insert(0, {HERE!r})
    from pathlib import Path
    from tests.kit.daemon import Rank
    rank = Rank(Path(os.environ["CAPD_ENDPOINT"].removeprefix("unix:")), run_id=os.environ["CAPD_RUN_ID"])
    rank.connect()
    rank.put(1, 2, 3)
    rank.count(offered=5, arena_full=2)
    rank.expect_acks(1, 2, 3)
    rank.bye()
    print(json.dumps({{name: value for name, value in os.environ.items() if name.startswith("CAPD_")}}))
"""


def capd_run(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return forking.run(
        [sys.executable, "-m", "capd", "run", *arguments],
        cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True, timeout=90,
    )  # fmt: skip


def python(script: str) -> list[str]:
    return ["--", sys.executable, "-c", textwrap.dedent(script)]


@pytest.fixture(autouse=True)
def nothing_left(runtime_dir: Path) -> Iterator[None]:
    yield
    wait_for(lambda: not _processes(str(runtime_dir)), "no daemon is left")
    assert list(runtime_dir.glob("capd-run-*")) == []


def _processes(mark: str) -> list[str]:
    found = subprocess.run(["pgrep", "-f", mark], capture_output=True, text=True, check=False)
    return found.stdout.split()


def test_a_run_is_sealed_and_summed_up_and_the_same_id_continues_it(tmp_path: Path) -> None:
    first = capd_run("--store", "here", "--run-id", "demo", *python(CAPTURING_JOB), cwd=tmp_path)
    again = textwrap.dedent(CAPTURING_JOB) + "raise SystemExit(42)"
    second = capd_run("--store", "here", "--run-id", "demo", "--policy", "drop", *python(again), cwd=tmp_path)

    assert (first.returncode, second.returncode) == (0, 42), first.stderr + second.stderr
    lines = first.stderr.splitlines()
    assert "2 captures were dropped" in lines[0]
    assert "CAPD_ARENA_BYTES" in lines[0]
    assert any("3 records in" in line and str(tmp_path / "here" / "demo.zarr") in line for line in lines)
    assert any("offered 5, committed 3, dropped 2" in line for line in lines)
    assert lines[-1] == "capd: next  capd report here/demo.zarr -o report.html · capd ls here/demo.zarr"
    assert "6 records in" in second.stderr
    assert len(stored_payloads(tmp_path / "here" / "demo.zarr")) == 6
    environ = json.loads(first.stdout)
    assert environ["CAPD_STORE"] == str(tmp_path / "here")
    assert (environ["CAPD_POLICY"], environ["CAPD_MAX_BLOCK_MS"]) == ("block", "30000")
    assert json.loads(second.stdout)["CAPD_POLICY"] == "drop"


@pytest.mark.slow
def test_the_summary_says_how_many_records_are_statistics_alone(tmp_path: Path) -> None:
    reduced = """
        from capd_client.protocol.key import Moment
        from capd_client.protocol.messages import Descriptor, Put
        rank.connect()
        rank.send(Put([Descriptor(4, 4096, 8, 0, (4,), Moment(), payload=False)]))
        rank.expect_acks(4)
    """
    job = textwrap.dedent(CAPTURING_JOB) + textwrap.dedent(reduced)
    done = capd_run("--store", "here", "--run-id", "demo", *python(job), cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    path = tmp_path / "here" / "demo.zarr"
    assert f"4 records in {path}, 1 of them statistics alone" in done.stderr


def test_without_captures_it_says_so_and_the_run_is_named_by_the_time(tmp_path: Path) -> None:
    done = capd_run("--", "sh", "-c", "echo $CAPD_RUN_ID; kill -9 $$", cwd=tmp_path)

    assert done.returncode == 128 + 9
    *_, why, then = done.stderr.splitlines()
    assert why.startswith("capd: nothing was captured: ")
    assert then == "capd: next  capd plan -- sh -c 'echo $CAPD_RUN_ID; kill -9 $$' · capd doctor --quick"
    assert re.fullmatch(r"\d{8}-\d{6}\n", done.stdout)


def test_a_store_that_cannot_be_used_stops_it_before_the_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    done = capd_run("--store", "file/x", "--", "touch", "started", cwd=tmp_path)

    assert done.returncode == 1
    assert "cannot use store" in done.stderr
    assert "the job was not started" in done.stderr
    assert not (tmp_path / "started").exists()


def test_capture_off_runs_the_job_without_a_daemon(tmp_path: Path) -> None:
    done = capd_run(
        *python("import os; print(os.environ['CAPD_ENDPOINT'])"), cwd=tmp_path, CAPD_ENDPOINT="off"
    )

    assert (done.returncode, done.stdout) == (0, "off\n")
    assert not (tmp_path / "captures").exists()


@pytest.mark.parametrize("number", rows([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
def test_signals_reach_the_job_and_the_store_is_still_sealed(tmp_path: Path, number: signal.Signals) -> None:
    script = textwrap.dedent(CAPTURING_JOB) + textwrap.dedent("""
        import signal, time
        def leave(*_):
            raise SystemExit(33)
        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGINT, leave)
        Path("ready").touch()
        time.sleep(60)
    """)
    command = [sys.executable, "-m", "capd", "run", "--run-id", "s", "--", sys.executable, "-c", script]
    process = forking.popen(command, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True)
    wait_for((tmp_path / "ready").exists, "the job runs")
    process.send_signal(number)
    _, message = process.communicate(timeout=60)

    assert process.returncode == 33
    assert b"3 records" in message
    assert len(stored_payloads(tmp_path / "captures" / "s.zarr")) == 3


def test_the_job_outlives_its_daemon(tmp_path: Path) -> None:
    script = textwrap.dedent(CAPTURING_JOB) + textwrap.dedent("""
        import signal, socket, struct, time
        while not (pid := Path("daemon.pid").read_text()):
            time.sleep(0.01)
        os.kill(int(pid), signal.SIGKILL)
        while os.path.exists("daemon.pid"):
            time.sleep(0.01)
        raise SystemExit(5)
    """)
    command = [sys.executable, "-m", "capd", "run", "--run-id", "k", "--", sys.executable, "-c", script]
    (tmp_path / "daemon.pid").write_text("")
    process = forking.popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def daemon_pid() -> str:
        return next((pid for pid in children.read_text().split() if b"serve" in command_line(pid)), "")

    pid = wait_for(daemon_pid, "the daemon runs")
    (tmp_path / "daemon.pid").write_text(pid)
    wait_for(lambda: "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text(), "the daemon is dead")
    (tmp_path / "daemon.pid").unlink()
    _, message = process.communicate(timeout=60)

    assert process.returncode == 5
    assert b"the daemon ended before the job" in message
    assert b"capd serve --store" in message


def test_a_job_joins_the_daemon_that_the_environment_names(tmp_path: Path, runtime_dir: Path) -> None:
    daemon = DaemonProcess(tmp_path / "store", runtime_dir / "s.sock")
    try:
        done = capd_run(
            "--run-id", "j", *python(CAPTURING_JOB), cwd=tmp_path, CAPD_ENDPOINT=f"unix:{daemon.path}"
        )

        assert done.returncode == 0
        assert "3 records" in done.stderr
        assert daemon.process.poll() is None
        assert len(stored_payloads(tmp_path / "store" / "j.zarr")) == 3  # sealed at the end
        assert not (tmp_path / "captures").exists()
    finally:
        assert daemon.stop() == 0

    lost = capd_run("--", "sh", "-c", "exit 3", cwd=tmp_path, CAPD_ENDPOINT=f"unix:{daemon.path}")
    assert lost.returncode == 3
    assert "no daemon" in lost.stderr


def test_a_private_daemon_does_not_outlive_a_killed_capd_run(tmp_path: Path, runtime_dir: Path) -> None:
    command = [sys.executable, "-m", "capd", "run", "--", "sh", "-c", "touch ready; exec sleep 600"]
    process = forking.popen(command, cwd=tmp_path)
    wait_for((tmp_path / "ready").exists, "the job runs")
    children = [
        int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]
    process.kill()
    process.wait()

    wait_for(lambda: not list(runtime_dir.glob("capd-run-*")), "the daemon left and removed its directory")
    for pid in children:
        if b"sleep" in command_line(pid):
            os.kill(pid, signal.SIGKILL)  # the job itself goes on, which is right
