"""The parts of `capd serve` and `capd run` that decide before anything is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from capd.cli.jobs import companion as companion_module
from capd.cli.jobs.companion import STOP_MARGIN_S, Companion
from capd.cli.jobs.foreground import ForegroundJob, find_command
from capd.cli.jobs.place import endpoint_of, refuse_several_nodes, shared_run_id
from capd.cli.jobs.settings import checked_flags, checked_settings, job_environment
from capd.errors import ConfigError

COMPANION = Companion("unix:/run/s.sock", "run-1", Path("/captures"))


def test_commands_that_cannot_run_exit_like_a_shell(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("no program")
    for command, code in (("no-such-command", 127), (str(tmp_path), 126), (str(tmp_path / "plain.txt"), 126)):
        with pytest.raises(typer.Exit) as stopped:
            find_command(command)
        assert stopped.value.exit_code == code
    assert os.access(find_command("sh"), os.X_OK)


def test_a_jobs_exit_code_and_signal_are_passed_on(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("#!/no/such/interpreter\n")
    (tmp_path / "bad").chmod(0o700)
    environ = dict(os.environ)
    with ForegroundJob() as job:
        assert job.run([sys.executable, "-c", "raise SystemExit(7)"], environ) == 7
        assert job.run(["/bin/sh", "-c", "kill -11 $$"], environ) == 128 + 11
        assert job.run([str(tmp_path / "bad")], environ) == 126


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_start_of_the_job_ends_the_job(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def started(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*args, **options)
        signal.raise_signal(number)
        return process

    monkeypatch.setattr(subprocess, "Popen", started)
    with ForegroundJob() as job:
        assert job.run(["/bin/sleep", "600"], dict(os.environ)) == 128 + number


def test_the_job_learns_endpoint_store_and_run_and_waits_rather_than_drops() -> None:
    assert job_environment({"HOME": "/root"}, COMPANION, {}, {}) == {
        "HOME": "/root",
        "CAPD_LOG": "INFO",
        "CAPD_ENDPOINT": "unix:/run/s.sock",
        "CAPD_STORE": "/captures",
        "CAPD_RUN_ID": "run-1",
        "CAPD_POLICY": "block",
        "CAPD_MAX_BLOCK_MS": "30000",
    }


def test_flags_win_over_the_environment_and_that_over_the_file_and_the_default() -> None:
    environ = {"CAPD_POLICY": "block", "CAPD_STEPS": "9", "CAPD_SLICE": "stride:2"}
    flags = checked_flags({"policy": "thin", "mode": "sample:1/4", "steps": "0-2", "quant_type": "mxfp8"})
    flagged = job_environment(environ, COMPANION, flags, {"policy": "block"})
    assert flagged["CAPD_POLICY"] == "thin"
    assert job_environment({"CAPD_LOG": "ERROR"}, COMPANION, {}, {})["CAPD_LOG"] == "ERROR"
    assert (flagged["CAPD_MODE"], flagged["CAPD_STEPS"]) == ("sample:1/4", "0-2")
    assert (flagged["CAPD_QUANT_TYPE"], flagged["CAPD_SLICE"]) == ("mxfp8", "stride:2")

    assert job_environment({"CAPD_POLICY": "drop"}, COMPANION, {}, {})["CAPD_POLICY"] == "drop"
    assert "CAPD_POLICY" not in job_environment({}, COMPANION, {}, {"policy": "drop"})
    assert job_environment({"CAPD_MAX_BLOCK_MS": "5"}, COMPANION, {}, {})["CAPD_MAX_BLOCK_MS"] == "5"


def test_a_private_daemon_gets_the_time_to_stop_that_it_was_configured_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "capd.toml"
    config.write_text("[daemon]\nshutdown_timeout_s = 500.0\n")
    monkeypatch.setattr(companion_module, "_wait_ready", lambda *_: None)

    with companion_module.start(tmp_path / "store", "r", config) as companion:
        assert companion.stop_s == 500 + STOP_MARGIN_S
        assert companion.process is not None
        companion.process.kill()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy", "guess"),
        ("mode", "sample:1/0"),
        ("steps", "1-x"),
        ("slice", "first"),
        ("quant_type", ""),
    ],
)
def test_unusable_job_options_are_refused_by_their_flag(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')}: "):
        checked_flags({name: value})


def test_what_the_job_would_only_warn_of_is_refused_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checked_settings({"CAPD_MODE": "stats", "CAPD_ENDPOINT": "unix:/run/s.sock"})
    with pytest.raises(ConfigError, match=r"mode \(env CAPD_MODE\): 'stat' is not supported.*stats[^;]*$"):
        checked_settings({"CAPD_MODE": "stat"})
    (tmp_path / "capd.toml").write_text('policy = "blok"\n')
    with pytest.raises(ConfigError, match=r"policy \(file .*capd\.toml\): 'blok'"):
        checked_settings({})


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        ({}, ["torchrun", "--nnodes=2", "train.py"]),
        ({}, ["torchrun", "--nnodes", "1:4", "train.py"]),
        ({"SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}, ["python", "train.py"]),
    ],
)
def test_several_nodes_without_a_shared_id_are_refused_with_the_remedy(
    environ: dict[str, str], command: list[str]
) -> None:
    with pytest.raises(ConfigError, match="--run-id NAME"):
        refuse_several_nodes(environ, command)


def test_one_node_and_slurm_steps_need_no_run_id() -> None:
    refuse_several_nodes(
        {"SLURM_NNODES": "1"}, ["torchrun", "--nnodes=1", "--nproc-per-node", "8", "train.py"]
    )
    refuse_several_nodes({}, ["torchrun", "--nnodes"])
    assert shared_run_id({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}) == "slurm-7.0"
    assert shared_run_id({"SLURM_JOB_ID": "7"}) is None


def test_the_daemon_that_is_joined(tmp_path: Path) -> None:
    given, default = {"CAPD_ENDPOINT": "unix:/run/s.sock"}, {"XDG_RUNTIME_DIR": str(tmp_path)}
    at_default = f"unix:{tmp_path}/capd/capd.sock"

    assert endpoint_of({}, attach=False, store=None) == ""  # one of its own
    assert endpoint_of(default, attach=False, store=tmp_path) == ""
    assert endpoint_of(default, attach=True, store=None) == at_default
    assert endpoint_of({**given, **default}, attach=True, store=None) == "unix:/run/s.sock"
    assert endpoint_of(given, attach=False, store=tmp_path) == "unix:/run/s.sock"
    assert endpoint_of({"CAPD_ENDPOINT": " OFF "}, attach=True, store=tmp_path) == "off"
    with pytest.raises(ConfigError, match="--store"):
        endpoint_of(default, attach=True, store=tmp_path)
