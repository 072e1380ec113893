"""The start-up line that an installation of capd has: nothing without CAPD_WATCH, never an error, one start with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capd.cli.jobs.startup import BOOTSTRAP
from tests.kit.jobs.installed import Installed
from tests.kit.tiers import rows

ON = {"CAPD_ENDPOINT": "unix:/nowhere/capd.sock", "CAPD_WATCH": "1"}
LOOK = """
import json, sys
print(json.dumps([sorted(sys.modules), [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path], sys.path]))
"""


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed") / "venv")


@pytest.fixture
def installed(venv: Installed) -> Installed:
    venv.install()
    return venv


def start(installed: Installed, *flags: str, **environ: str) -> list[list[str]]:
    """The modules, the finders and the path of a new process, which prints nothing else."""
    done = installed.run(*flags, "-c", LOOK, **environ)
    assert (done.returncode, done.stderr) == (0, "")
    return list(json.loads(done.stdout))


@pytest.mark.parametrize("watch", rows([None, "0", "off", "no idea"], ["0"]))
def test_without_the_variable_nothing_is_different(watch: str | None, installed: Installed) -> None:
    environ = {"CAPD_ENDPOINT": ON["CAPD_ENDPOINT"], **({} if watch is None else {"CAPD_WATCH": watch})}
    with_capd = start(installed, **environ)
    (installed.site / "capd_watch.pth").unlink()

    assert with_capd == start(installed, **environ)


def test_without_an_endpoint_nothing_is_different(installed: Installed) -> None:
    assert start(installed, CAPD_WATCH="1") == start(installed)


@pytest.mark.parametrize("is_copied", [False, True], ids=["editable", "wheel"])
def test_a_process_with_the_variable_waits_for_torch_as_under_capd_run(
    is_copied: bool, installed: Installed
) -> None:
    if is_copied:
        (installed.site / "_capd.pth").write_text("")
        (installed.site / "capd_client").symlink_to(BOOTSTRAP.parent)
    _, finders, path = start(installed)
    modules, waiting, path_then = start(installed, **ON)

    assert waiting == ["_Finder", *finders, "_Spare"]
    assert path_then == path
    assert "capd_client" not in modules
    assert start(installed, "-I", **ON)[1] == waiting


def test_a_job_of_capd_run_is_started_once(installed: Installed) -> None:
    _, finders, path = start(installed)

    both = start(installed, PYTHONPATH=str(BOOTSTRAP), **ON)
    assert both[1] == ["_Finder", *finders, "_Spare"]
    assert both[2] == path


def test_an_installation_that_is_gone_or_broken_says_nothing(installed: Installed, tmp_path: Path) -> None:
    finders = start(installed)[1]
    (installed.site / "_capd.pth").write_text(f"{tmp_path}\n")
    assert start(installed, **ON)[1] == finders

    broken = tmp_path / "capd_client/bootstrap"
    broken.mkdir(parents=True)
    (broken / "sitecustomize.py").write_text((BOOTSTRAP / "sitecustomize.py").read_text())
    (broken / "_capd_startup.py").write_text("raise OSError('broken')")
    assert start(installed, **ON)[1] == finders


def test_a_problem_is_said_where_there_is_no_capd_run_to_say_it(installed: Installed) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(BOOTSTRAP)!r}); from _capd_notes import note\n"
        "note('torch'); note('problem msgspec is missing')"
    )

    assert installed.run("-c", script).stderr == "capd: nothing is captured: msgspec is missing\n"
