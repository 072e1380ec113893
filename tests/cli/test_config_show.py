"""`capd config show`: every setting with its origin, for daemon and job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from capd.config import DaemonSettings
from tests.cli.conftest import Result

Capd = Callable[..., Result]


def test_every_setting_has_a_value_and_an_origin(capd: Capd, tmp_path: Path) -> None:
    (tmp_path / "capd.toml").write_text('policy = "block"\n[when]\nsteps = "0-3"\n[daemon]\ncodec = "fast"\n')

    found = capd("config", "show", "--json", cwd=tmp_path, CAPD_THREADS="3", CAPD_QUANT_TYPE="mxfp8").json

    assert found["file"] == "capd.toml"
    assert set(found["daemon"]) == set(DaemonSettings.model_fields)
    assert found["daemon"]["codec"] == {"value": "fast", "origin": "file capd.toml"}
    assert found["daemon"]["threads"] == {"value": 3, "origin": "env CAPD_THREADS"}
    assert found["daemon"]["store"]["origin"] == "default"
    assert found["job"]["quant_type"] == {"value": "mxfp8", "origin": "env CAPD_QUANT_TYPE"}
    assert found["job"]["policy"]["value"] == "block"
    assert found["job"]["steps"]["origin"].startswith("file ")
    assert found["job"]["endpoint"] == {"value": None, "origin": "default", "chosen": "off"}


def test_the_text_shows_what_capd_chose_itself(capd: Capd, tmp_path: Path, runtime_dir: Path) -> None:
    found = capd("config", "show", cwd=tmp_path)

    assert found.code == 0
    assert f"unix:{runtime_dir}/capd/capd.sock" in found.out
    assert "keep_free" in found.out
    rows = [line.split() for line in found.out.splitlines()]
    assert ["max_mb_per_step", "(no", "limit)", "default"] in rows
    assert ["arena_bytes", "(automatic)", "default"] in rows


def test_a_named_file_is_read_by_both_sides(capd: Capd, tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text('policy = "block"\n[daemon]\nthreads = 2\n')

    found = capd("config", "show", "--config", file, "--json", cwd=tmp_path).json

    assert found["daemon"]["threads"]["value"] == 2
    assert found["job"]["policy"]["value"] == "block"


def test_a_value_that_the_job_cannot_use_and_a_name_that_is_none_are_said(
    capd: Capd, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = capd("config", "show", "--json", cwd=tmp_path, CAPD_MODE="stat", CAPD_SLICES="first:1")

    assert found.code == 0
    assert found.json["job"]["mode"] == {"value": "tensor", "origin": "default"}
    assert "mode (env CAPD_MODE): 'stat' is not supported" in caplog.text
    assert "CAPD_SLICES is no setting and has no effect; did you mean CAPD_SLICE?" in found.err
