"""`capd config show`: every setting with its origin, for daemon and job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from capd.config import DaemonSettings
from tests.kit.store.cli import Result

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
    assert ["ring_bytes", "(automatic)", "default"] in rows
    assert ["ring", *["(wait", "under", "policy", "block,", "else", "drop)"], "default"] in rows
    assert ["snapshot", "always", "default"] in rows


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
    assert "CAPD_SLICES is not a setting and has no effect; did you mean CAPD_SLICE?" in found.err


def test_check_names_everything_that_cannot_be_used(capd: Capd, tmp_path: Path) -> None:
    (tmp_path / "capd.toml").write_text(
        '[daemon]\ncodec = "zip"\nthreds = 2\n[[rule]]\ntensor = "input"\n[[rule]]\ninclude = "("\nstore = "none"\n'
    )

    found = capd("config", "check", "--json", cwd=tmp_path, CAPD_SLICES="first:1")

    assert found.code == 2
    assert [line.removeprefix("capd.toml: ").partition("; choose")[0] for line in found.json] == [
        "unknown setting tensor in rule '1'; did you mean tensors?",
        "rule '2': '(' is not a regular expression: missing ), unterminated subpattern at position 0",
        "rule '2': store: 'none' is unknown; known: full, stats, both",
        "[daemon] codec: unknown codec 'zip'",
        "[daemon] threds: unknown key; did you mean 'threads'?",
        "CAPD_SLICES is not a setting and has no effect; did you mean CAPD_SLICE?",
    ]
    assert "threds" in capd("config", "check", cwd=tmp_path).out
    assert "and 4 more; `capd config check` lists them" in capd("stats", cwd=tmp_path).err


def test_check_reads_the_variables_too_and_has_nothing_to_say_about_what_is_right(
    capd: Capd, tmp_path: Path
) -> None:
    file = tmp_path / "other.toml"
    file.write_text('[[rule]]\nname = "mlp"\ninclude = "mlp"\n')

    assert (capd("config", "check", cwd=tmp_path).out, capd("config", "check", file).code) == (
        "the environment: nothing wrong\n",
        0,
    )
    wrong = capd("config", "check", file, "--json", CAPD_SELECT="none.toml")
    assert (wrong.code, len(wrong.json)) == (2, 1)
    assert "rules (env CAPD_SELECT)" in wrong.json[0]
    assert "none.toml does not exist" in wrong.json[0]


def test_rules_are_shown_by_name_and_in_json_as_they_are(capd: Capd, tmp_path: Path) -> None:
    (tmp_path / "capd.toml").write_text(
        '[[rule]]\nname = "mlp"\ninclude = "mlp"\nlayers = 3\n[[rule]]\nstore = "stats"\n'
    )

    text = capd("config", "show", cwd=tmp_path).out
    found = capd("config", "show", "--json", cwd=tmp_path).json["job"]["rules"]

    assert [line.split()[:3] for line in text.splitlines() if line.split()[:1] == ["rules"]] == [
        ["rules", "mlp,", "2"]
    ]
    assert found["value"] == [{"name": "mlp", "include": "mlp", "layers": 3}, {"name": "2", "store": "stats"}]
    assert found["origin"].startswith("file ")
