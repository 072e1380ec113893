"""What `capd run` refuses about collections, with a reason, before anything is started."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from capd.cli.app import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `capd run` says; it must end with 2."""
    with pytest.raises(SystemExit) as end:
        main(["run", *arguments, "--", "true"])
    captured = capsys.readouterr()
    assert (end.value.code, captured.out) == (2, "")
    return captured.err


@pytest.fixture(autouse=True)
def nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", started)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--control-iter", "0"], "--control-iter belongs to a collection run: --mode single, batch, quick"),
        (["--mode", "stats", "--json"], "--json belongs to"),
        (["--require", "x"], "--require belongs to"),
        (["--mode", "quick", "--control-iter", "2"], "--mode single"),
        (["--mode", "quick", "--steps", "x"], "--steps"),
        (["--mode", "quick", "--env", "A"], "--env"),
        (["--mode", "batch", "--control-iter", "0"], "CAPD_MAX_DISK=200GB"),
        (["--mode", "batch", "--quant-type", "a,a"], "different names"),
        (["--mode", "sometimes"], "sample:1/N"),
    ],
)
def test_options_that_cannot_be(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, *options)


def test_settings_that_cannot_be(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPD_MODE", "sample:1/4")
    assert "keeps whole micro-batches" in refused(capsys, "--mode", "quick")
    assert "keeps whole micro-batches" in refused(capsys, "--mode", "quick", "--env", "CAPD_MODE=sample:1/2")
    monkeypatch.delenv("CAPD_MODE")
    monkeypatch.setenv("CAPD_ENDPOINT", "off")
    assert "would collect nothing" in refused(capsys, "--mode", "quick")
    monkeypatch.delenv("CAPD_ENDPOINT")
    monkeypatch.setenv("SLURM_NNODES", "2")
    assert "CAPD_COLLECT=N/M" in refused(capsys, "--mode", "quick", "--run-id", "r")


def test_a_byte_budget_allows_all_micro_batches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPD_MAX_DISK", "1GB")
    said = refused(capsys, "--mode", "single", "--control-iter", "0", "--require", "no/such/data")

    assert "--require: no/such/data does not exist" in said


def test_a_recipe_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in (("--quant-type", "mxfp8"), ("--mode", "batch"), ()):
        monkeypatch.setenv("CAPD_EMULATE", "mxfp9")
        assert "mxfp9" in refused(capsys, *mode)
        monkeypatch.delenv("CAPD_EMULATE")
    told = ("--env", 'CAPD_EMULATE={"linear": "{quant_type}"}', "--quant-type", "mxfp8,mine")
    assert "'mine'" in refused(capsys, "--mode", "batch", *told)
