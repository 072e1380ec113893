"""A mistake in capd.toml ends `capd run` before the job, and touches neither a daemon nor a job that run already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from capd.store.alerts.file import alerts_of_run
from tests.kit.daemon import DaemonProcess, daemons, wait_for
from tests.kit.paths import REPOSITORY

NAN = '[[trigger]]\nname = "nan"\nmetric = "nan"\nabove = 0\n'
BAD = (
    ('[[trigger]]\nname = "x"\nmetric = "nann"\nabove = 0\n', "trigger 'x': metric: 'nann' is unknown; did"),
    ('[lab]\nformats = ["mxfp9"]\n', "unknown format 'mxfp9'; known: bf16, fp16, fp8, mxfp8"),
    ('[lab]\nformats = ["mxfp8"]\nsample = "auto"\n', "[lab] sample: 'auto' is no sample; write 1/N, such as 1/8"),
)  # fmt: skip
JOB = (
    "import torch, capd_client\n"
    "capd_client.capture(torch.tensor([float('nan')]), tensor_name='input', iteration=3)\n"
    "assert capd_client.flush(timeout_s=60)\n"
    "capd_client.close()\n"
)


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CAPD_")}
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return {**inherited, "PYTHONPATH": path, **more}


@pytest.mark.parametrize(("text", "said"), BAD)
def test_capd_run_says_what_is_wrong_in_one_line_and_starts_nothing(
    tmp_path: Path, text: str, said: str
) -> None:
    config, begun = tmp_path / "capd.toml", tmp_path / "begun"
    config.write_text(text)
    words = ["run", "--store", str(tmp_path / "store"), "--config", str(config), "--", "touch", str(begun)]
    done = subprocess.run(
        [sys.executable, "-m", "capd", *words], capture_output=True, text=True, check=False, env=environment()
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert str(config) in done.stderr
    assert said in done.stderr
    assert not begun.exists()
    assert not (tmp_path / "store").exists()


def test_a_running_daemon_and_a_job_go_on_with_the_rules_of_its_start(runtime_dir: Path) -> None:
    config = runtime_dir / "capd.toml"
    config.write_text(NAN)
    with daemons() as made:
        daemon = DaemonProcess(
            runtime_dir / "store", runtime_dir / "s.sock", "--config", str(config)
        )  # fmt: skip
        made.append(daemon)
        config.write_text("".join(text for text, _ in BAD[:2]))
        subprocess.run(
            [sys.executable, "-c", JOB],
            env=environment(
                CAPD_ENDPOINT=f"unix:{runtime_dir / 's.sock'}", CAPD_RUN_ID="run", CAPD_CONFIG=str(config)
            ),
            check=True,
            timeout=100,
        )
        [alert] = wait_for(lambda: alerts_of_run(runtime_dir / "store" / "run.zarr"), "the alert")
    assert (alert.rule, alert.iteration) == ("nan", 3)
