"""The command as a whole: help, versions, exit codes, error lines, what is imported."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from capd.cli.app import VERBS
from tests.kit.store.cli import Result, run_capd

Capd = Callable[..., Result]


def test_help_lists_every_verb() -> None:
    found = run_capd("--help")

    assert found.code == 0
    assert all(f"  {name} " in found.out for name in VERBS)


def test_every_verb_explains_itself(capd: Capd) -> None:
    for name in VERBS:
        found = capd(name, "--help")
        assert not re.search(r"^  \S+ <", found.out, re.M), "the type of an argument in Python"
        assert found.code == 0, name
        assert "Usage: capd" in found.out


def test_without_a_verb_the_help_is_shown_as_a_usage_error(capd: Capd) -> None:
    found = capd()

    assert found.code == 2
    assert "Usage: capd" in found.out


def test_a_mistyped_verb_or_option_is_a_usage_error_with_a_hint(capd: Capd) -> None:
    assert capd("stat").code == 2
    assert "Did you mean 'stats'" in capd("stat").err
    assert capd("ls", "--no-such-option").code == 2


def test_version_names_capd_python_packages_and_format(capd: Capd) -> None:
    text = capd("--version")
    found = capd("--version", "--json")

    assert text.code == found.code == 0
    assert set(found.json) >= {"capd", "python", "torch", "zarr", "format"}
    assert found.json["format"] == "1"
    assert f"zarr {found.json['zarr']}" in text.out


def test_an_error_is_one_line_on_stderr_and_nothing_on_stdout(tmp_path: Path) -> None:
    found = run_capd("ls", tmp_path / "missing.zarr")

    assert (found.code, found.out) == (1, "")
    assert found.err.startswith("capd: ")
    assert len(found.err.splitlines()) == 1


def test_debug_shows_the_traceback(capd: Capd, tmp_path: Path) -> None:
    found = capd("--debug", "ls", tmp_path / "missing.zarr")

    assert found.code == 1
    assert "Traceback" in found.err
    assert found.err.splitlines()[-1].startswith("capd: ")


def test_a_bad_setting_is_a_usage_error_that_names_the_variable(capd: Capd) -> None:
    found = capd("config", "show", CAPD_THREADS="many")

    assert found.code == 2
    assert "CAPD_THREADS" in found.err


@pytest.mark.parametrize(("policy", "code"), [("drop", 0), ("block", 0), ("thin", 0), ("wait", 2)])
def test_run_takes_the_policies_there_are_and_names_them_for_another(
    capd: Capd, policy: str, code: int
) -> None:
    found = capd("run", "--policy", policy, "--", "true", CAPD_ENDPOINT="off")

    assert found.code == code
    assert ("--policy: 'wait' is not supported; supported: drop, block, thin" in found.err) == (code == 2)


def test_a_closed_pipe_is_quiet(second: Path) -> None:
    command = f"{sys.executable} -m capd.cli.app ls {second} 2>&1 | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)

    assert "Traceback" not in done.stdout + done.stderr


def test_reading_commands_import_neither_torch_nor_zarr(second: Path) -> None:
    script = (
        "import sys\n"
        "from capd.cli.app import main\n"
        "verbs = [['--help'], ['--version'], ['ctl', 'select', '--help'], ['ls', PATH], ['stats', PATH]]\n"
        "for args in (*verbs, ['doctor', '--quick']):\n"
        "    try:\n        main(args)\n"
        "    except SystemExit as end:\n        assert end.code in (None, 0) or args[0] == 'doctor', args\n"
        "    assert not {'torch', 'zarr'} & sys.modules.keys(), args\n"
        "print('done')\n"
    ).replace("PATH", repr(str(second)))
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.stdout.endswith("done\n"), done.stderr


def test_ctl_without_a_daemon_says_where_it_looked(capd: Capd, tmp_path: Path) -> None:
    found = capd("ctl", "stop", "--endpoint", f"unix:{tmp_path}/none.sock")

    assert (found.code, found.out) == (3, "")
    assert "none.sock" in found.err
