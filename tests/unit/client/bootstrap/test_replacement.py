"""CAPD_REPLACE_TENSOR_SAVER: what `import megatron.core.tensor_saver` gives in a process of `capd run`."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from capd.cli.jobs.startup import BOOTSTRAP, Startup
from tests.unit.client.bootstrap.test_sitecustomize import ON, python, state

LOOK = "import megatron.core.tensor_saver as m; from megatron.core import tensor_saver as n; print(m.__name__, m is n)"
CAPDS, OWN = "capd_client.tensor_saver True", "megatron.core.tensor_saver True"


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """A Megatron with tensor_saver's module."""
    core = tmp_path / "fork" / "megatron" / "core"
    core.mkdir(parents=True)
    for file in (core.parent / "__init__.py", core / "__init__.py", core / "tensor_saver.py"):
        file.write_text("")
    return tmp_path / "fork"


def imported(fork: Path, *before: Path, **environment: str) -> str:
    path = os.pathsep.join(map(str, [BOOTSTRAP, *before, fork]))
    done = python("-c", LOOK, directory=fork, PYTHONPATH=path, **ON, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "word", ["1", *(pytest.param(word, marks=pytest.mark.fault) for word in ("true", "On"))]
)
def test_it_is_capds_where_that_is_asked_for(fork: Path, word: str) -> None:
    assert imported(fork, CAPD_REPLACE_TENSOR_SAVER=word) == CAPDS


@pytest.mark.slow
def test_it_is_capds_where_nothing_is_watched(fork: Path) -> None:
    assert imported(fork, CAPD_REPLACE_TENSOR_SAVER="1", CAPD_WATCH="off") == CAPDS


@pytest.mark.parametrize("word", ["", "0", "off"])
def test_it_is_the_jobs_own_otherwise(fork: Path, word: str) -> None:
    assert imported(fork, CAPD_REPLACE_TENSOR_SAVER=word) == OWN


def test_a_megatron_without_the_module_has_it(fork: Path) -> None:
    (fork / "megatron" / "core" / "tensor_saver.py").unlink()

    assert imported(fork, CAPD_REPLACE_TENSOR_SAVER="1") == CAPDS


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """An interpreter with what this one has installed, but for Megatron."""
    venv.create(tmp_path / "bare", symlinks=True)
    ours, theirs = (
        sysconfig.get_path("purelib", vars=base) for base in ({}, {"base": str(tmp_path / "bare")})
    )
    for entry in Path(ours).iterdir():
        if not entry.name.startswith("megatron"):
            (Path(theirs) / entry.name).symlink_to(entry)
    return tmp_path / "bare" / "bin" / "python"


@pytest.mark.slow
def test_without_megatron_its_packages_are_empty_but_for_it(bare_python: Path) -> None:
    def bare(code: str) -> subprocess.CompletedProcess[str]:
        return python(
            "-c", code, program=bare_python, PYTHONPATH=str(BOOTSTRAP), CAPD_REPLACE_TENSOR_SAVER="1", **ON
        )

    assert bare(LOOK).stdout.strip() == CAPDS
    called = bare("from megatron.core.tensor_saver import save_tensor; print(save_tensor.__module__)")
    assert called.stdout.strip() == "capd_client.tensor_saver", called.stderr
    for missing in ("megatron.core.parallel_state", "megatron.training", "megatron.core.tensor_saver.more"):
        assert f"ModuleNotFoundError: No module named '{missing}'" in bare(f"import {missing}").stderr
    assert "cannot import name 'parallel_state'" in bare("from megatron.core import parallel_state").stderr


def test_where_capds_cannot_be_imported_the_job_has_its_own(fork: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "capd_client.py").write_text("raise OSError('broken')")

    assert imported(fork, tmp_path / "broken", CAPD_REPLACE_TENSOR_SAVER="1") == OWN


def test_no_model_is_searched_for_then() -> None:
    plain = state()[1]

    found = state(PYTHONPATH=str(BOOTSTRAP), CAPD_REPLACE_TENSOR_SAVER="1", **ON)[1]
    assert found == ["_Replacement", *plain, "_Spare", "_Parents"]


def test_it_is_told_why_nothing_was_captured() -> None:
    with Startup("off", replace=True) as startup:
        environ: dict[str, str] = {}
        startup.put_into(environ)
        notes = Path(environ["CAPD_RUN_NOTES"])
        assert str(BOOTSTRAP) in environ["PYTHONPATH"]
        notes.write_text("python\n")
        assert "never imported megatron.core.tensor_saver" in startup.why_nothing(connected=False)
        notes.write_text("python\nreplaced\n")
        assert "captured nothing with it" in startup.why_nothing(connected=False)
        notes.write_text("python\nproblem it is broken\n")
        assert startup.why_nothing(connected=False) == "it is broken"
