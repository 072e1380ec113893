"""What a Python process sees of the start-up files: nothing, unless it trains. Real interpreters, without torch."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from capd.cli.jobs.startup import BOOTSTRAP, Startup

ON = {"CAPD_ENDPOINT": "unix:/nowhere/capd.sock"}
LOOK = """
import json, sys
print(json.dumps([sorted(sys.modules), [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path], sys.path]))
"""


def python(
    *arguments: str, program: Path | str = sys.executable, directory: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CAPD_", "PYTHON"))}
    return subprocess.run(
        [program, *arguments],
        env={**inherited, **environment}, cwd=directory, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def state(*flags: str, **environment: str) -> list[list[str]]:
    done = python(*flags, "-c", LOOK, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    modules, finders, path = json.loads(done.stdout)
    return [modules, finders, path]


def test_without_an_endpoint_nothing_is_different() -> None:
    plain = state()

    assert state(PYTHONPATH=str(BOOTSTRAP)) == plain
    assert state(PYTHONPATH=str(BOOTSTRAP), CAPD_ENDPOINT="off") == plain


def test_a_process_that_imports_no_torch_has_three_small_modules_and_waits() -> None:
    modules, finders, path = state()
    started = state(PYTHONPATH=str(BOOTSTRAP), **ON)

    assert set(started[0]) - set(modules) <= {
        "_capd_startup",
        "_capd_after_import",
        "_capd_notes",
        "__future__",
    }
    assert started[1] == ["_Finder", *finders, "_Spare"]
    assert started[2] == path
    assert state(PYTHONPATH=str(BOOTSTRAP), CAPD_WATCH="off", **ON)[1] == [*finders, "_Spare"]


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_interpreters_told_to_read_no_environment_or_no_site_are_as_ever(flag: str) -> None:
    assert state(flag, PYTHONPATH=str(BOOTSTRAP), **ON)[1] == state(flag)[1]


SITES = {
    "runs": "import sys; sys.marked = 'user site'; marked = 1",
    "fails": "raise OSError('user site is broken')",
    "misses": "import no_such_module_of_the_user",
    "exits": "raise SystemExit(7)",
}


@pytest.mark.parametrize("kind", [*SITES, "none"])
def test_the_jobs_own_sitecustomize_behaves_as_without_capd(kind: str, tmp_path: Path) -> None:
    if kind != "none":
        (tmp_path / "sitecustomize.py").write_text(SITES[kind])
    look = (
        "import sys; print(getattr(sys, 'marked', None), 'sitecustomize' in sys.modules)\n"
        "try:\n import sitecustomize; print(sitecustomize.__file__, sitecustomize.marked)\n"
        "except Exception as error: print(type(error), error)\n"
    )
    plain = python("-W", "error", "-c", look, PYTHONPATH=str(tmp_path))
    both = os.pathsep.join([str(BOOTSTRAP), str(tmp_path)])
    with_capd = python("-W", "error", "-c", look, PYTHONPATH=both, **ON)

    assert (with_capd.returncode, with_capd.stdout) == (plain.returncode, plain.stdout)
    if kind == "exits":  # a traceback, with a line for each file
        assert with_capd.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1] == "SystemExit: 7"
    else:
        assert with_capd.stderr == plain.stderr
    if kind == "runs":
        assert plain.stdout.startswith("user site True\n")


def test_usercustomize_and_a_second_bootstrap_of_another_tool_still_run(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "sitecustomize.py").write_text("print('user')")
    # As ddtrace does it: itself first, then whoever is next on the path.
    (other / "sitecustomize.py").write_text(
        f"import sys\nprint('other')\nsys.path.remove({str(other)!r})\ndel sys.modules['sitecustomize']\n"
        "import sitecustomize"
    )
    for order in ((other, BOOTSTRAP, tmp_path), (BOOTSTRAP, other, tmp_path)):
        path = os.pathsep.join(map(str, order))
        done = python("-c", "import sys; print('_capd_startup' in sys.modules)", PYTHONPATH=path, **ON)
        assert (done.stdout.split(), done.stderr) == (["other", "user", "True"], "")


def test_a_job_without_capd_client_finds_that_of_capd_run_and_one_that_has_it_its_own(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "capd_client.py").write_text("")
    start = f"import sys; sys.path.insert(0, {str(BOOTSTRAP)!r})\ntry: import sitecustomize\nexcept ImportError: pass\n"
    look = "import capd_client; print(capd_client.__file__)"
    both = os.pathsep.join([str(BOOTSTRAP), str(tmp_path / "own")])

    lent = python("-I", "-S", "-c", start + look, **ON)  # no site-packages
    own = python("-c", look, directory=tmp_path, PYTHONPATH=both, **ON)

    assert lent.stdout.strip() == str(BOOTSTRAP.parent / "__init__.py"), lent.stderr
    assert own.stdout.strip() == str(tmp_path / "own" / "capd_client.py")


def test_errors_of_the_start_up_reach_nobody_but_who_asks(tmp_path: Path) -> None:
    broken = tmp_path / "bootstrap"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text((BOOTSTRAP / "sitecustomize.py").read_text())
    (broken / "_capd_startup.py").write_text("raise OSError('broken')")

    assert python("-c", "print(1)", PYTHONPATH=str(broken), **ON).stderr == ""
    told = python("-c", "print(1)", PYTHONPATH=str(broken), CAPD_LOG="debug", **ON)
    assert (told.stdout, told.stderr) == ("1\n", "capd: start-up: OSError('broken')\n")


def test_every_python_can_read_the_first_file() -> None:
    text = (BOOTSTRAP / "sitecustomize.py").read_text()
    tree = ast.parse(text, feature_version=(3, 4))

    assert text.isascii()
    new = (
        ast.JoinedStr,
        ast.AnnAssign,
        ast.arg,
        ast.Nonlocal,
        ast.AsyncFunctionDef,
        ast.NamedExpr,
        ast.Starred,
    )
    assert [node for node in ast.walk(tree) if isinstance(node, new)] == []
    assert [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)] == []  # of __future__, too


@pytest.mark.parametrize("before", ["", "/a", "/a:/b", ":/a", "/a:", "relative:", "/a::/b"])
def test_the_jobs_own_path_stays_as_it_is_behind_the_start_up_files(before: str) -> None:
    def rest(environ: dict[str, str]) -> list[str]:
        found = python(
            "-c", "import json, sys; print(json.dumps(sys.path[1:]))", directory=Path("/"), **environ
        )
        paths: list[str] = json.loads(found.stdout)
        return paths

    environ = {"PYTHONPATH": before} if before else {}
    with Startup("auto") as startup:
        started = dict(environ)
        startup.put_into(started)
        startup.put_into(started)  # a job that is itself `capd run`

        assert started["PYTHONPATH"].split(os.pathsep).count(str(BOOTSTRAP)) == 1
        assert rest({**started, **ON}) == rest(environ)


def test_switched_off_the_environment_is_as_it_was() -> None:
    environ = {"PYTHONPATH": "/a"}
    with Startup("off") as startup:
        startup.put_into(environ)

    assert environ == {"PYTHONPATH": "/a"}


def test_processes_tell_how_far_they_came() -> None:
    with Startup("auto") as startup:
        environ = dict(ON)
        startup.put_into(environ)
        assert "read capd's start-up file" in startup.why_nothing(connected=False)
        for _ in range(3):
            python("-c", "pass", **environ)
        assert Path(environ["CAPD_RUN_NOTES"]).read_text() == "python\n"
        assert "imported torch" in startup.why_nothing(connected=False)
    assert not Path(environ["CAPD_RUN_NOTES"]).exists()
    assert python("-c", "print(1)", **environ).stdout == "1\n"  # a process that outlives its `capd run`


@pytest.mark.parametrize(
    ("of_models", "reason"),
    [
        ("empty", "the models that trained hold nothing that capd knows"),
        ("empty\nwatched", "no step was reached"),
        ("own", "no step was reached"),
    ],
)
def test_only_a_job_with_something_to_capture_is_told_of_its_steps(of_models: str, reason: str) -> None:
    with Startup("auto") as startup:
        environ = dict(ON)
        startup.put_into(environ)
        Path(environ["CAPD_RUN_NOTES"]).write_text(f"python\ntorch\nforward\n{of_models}\n")

        assert startup.why_nothing(connected=True).startswith(reason)
