"""The scripts of deploy/slurm without a Slurm: odd variables, links of other users, missing sockets."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.kit.paths import REPOSITORY

SLURM = REPOSITORY / "deploy" / "slurm"
OTHER_UID = 1001
as_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="a /run of the test's own needs root and unshare",
)


def on_a_node(script: str, before: str = "", after: str = "", **variables: str) -> str:
    """What a node's /run looks like after a script: type, mode, owner and path of everything in it, one a line."""
    run = "find /run -mindepth 1 -printf '%y %m %U %p\n' | sort"
    text = f"set -e; mount -t tmpfs -o mode=755 none /run; {before or ':'}; {SLURM / script}; {after or ':'}; {run}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        env=path_and(variables),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def path_and(variables: Mapping[str, str]) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], **variables}


@as_root
def test_the_prolog_makes_a_directory_for_the_jobs_user_that_the_epilog_removes() -> None:
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_UID": str(OTHER_UID),
        "SLURM_JOB_GID": "100",
        "SLURM_JOB_NAME": "a b; *",
    }
    made = ["d 700 1001 /run/capd/job-7", "d 755 0 /run/capd"]

    assert on_a_node("prolog.sh", **job).splitlines() == made
    # Again, as after a requeue.
    assert on_a_node("prolog.sh", after=str(SLURM / "prolog.sh"), **job).splitlines() == made
    # Whatever the job left there, it goes, and what a link names stays.
    left = f"{SLURM / 'prolog.sh'}; mkdir /run/other; touch /run/other/file; ln -s /run/other '/run/capd/job-7/a b'"
    after = on_a_node("epilog.sh", before=left, **job)
    assert "job-7" not in after
    assert "/run/other/file" in after


@as_root
@pytest.mark.parametrize("job", ["", "7;x", "../7", "7 8", "7_1", "-1", "7/8"])
@pytest.mark.parametrize("script", ["prolog.sh", "epilog.sh"])
def test_a_job_id_that_is_no_number_changes_nothing(script: str, job: str) -> None:
    kept = "mkdir -p /run/capd/job-7 /run/7 /run/capd/job-"

    assert len(on_a_node(script, kept, SLURM_JOB_ID=job, SLURM_JOB_UID="1001").splitlines()) == 4


@as_root
@pytest.mark.parametrize("owner", [0, OTHER_UID])
def test_the_prolog_gives_nobody_what_a_link_leads_to(owner: int) -> None:
    """Who once owned /run/capd could put a link where the directory of the next job comes."""
    link = f"mkdir /run/capd /run/secret; ln -s /run/secret /run/capd/job-7; chown {owner} /run/capd"

    found = on_a_node("prolog.sh", link, SLURM_JOB_ID="7", SLURM_JOB_UID=str(OTHER_UID))

    assert f"d 755 {owner} /run/capd" in found.splitlines()
    assert "d 755 0 /run/secret" in found.splitlines()


@as_root
def test_a_directory_of_another_owner_is_left_to_him() -> None:
    found = on_a_node("prolog.sh", "install -d -o 1001 /run/capd", SLURM_JOB_ID="7", SLURM_JOB_UID="1000")

    assert found == "d 755 1001 /run/capd\n"


def task_prolog(**variables: str) -> list[str]:
    done = subprocess.run(
        [SLURM / "task_prolog.sh"], capture_output=True, text=True, timeout=60, env=path_and(variables)
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_task_prolog_names_a_socket_only_to_those_who_ask_and_have_none(runtime_dir: Path) -> None:
    root = runtime_dir / "a b"
    (root / "job-7").mkdir(parents=True)
    asked = {"CAPD": "1", "CAPD_RUN_ROOT": str(root), "SLURM_JOB_ID": "7"}
    [missing] = task_prolog(**asked)
    assert missing.startswith("print capd: no daemon listens on ")
    (root / "job-7" / "capd.sock").touch()
    assert task_prolog(**asked) == [missing]

    with socket.socket(socket.AF_UNIX) as node, socket.socket(socket.AF_UNIX) as job:
        node.bind(str(root / "capd.sock"))
        assert task_prolog(**asked) == [
            f"export CAPD_ENDPOINT=unix:{root}/capd.sock", "export CAPD_RUN_ID=slurm-7",
        ]  # fmt: skip
        (root / "job-7" / "capd.sock").unlink()
        job.bind(str(root / "job-7" / "capd.sock"))
        assert task_prolog(**asked, CAPD_RUN_ID="exp 7") == [
            f"export CAPD_ENDPOINT=unix:{root}/job-7/capd.sock"
        ]
        assert task_prolog(**asked, CAPD_ENDPOINT="off") == []
        assert task_prolog(**{**asked, "CAPD": "0"}) == []


# It ignores the options of srun, as everything is on this node.
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
exec "$@"
"""


def test_the_job_has_its_arguments_and_its_exit_code_also_without_a_daemon(
    tmp_path: Path, runtime_dir: Path
) -> None:
    programs, place = tmp_path / "bin", runtime_dir / "capd.sock"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("capd", "#!/bin/sh\nexit 7\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as left:
        # A socket that an earlier daemon left.
        left.bind(str(place))
        done = subprocess.run(
            ["bash", SLURM / "capd.sbatch", "sh", "-c", 'echo "job $CAPD_ENDPOINT $1"; exit 3', "sh", "a  b"],
            capture_output=True, text=True, timeout=60, cwd=tmp_path,
            env={"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NNODES": "1",
                 "CAPD_ENDPOINT": f"unix:{place}"},
        )  # fmt: skip

    assert (done.returncode, done.stdout) == (3, f"job unix:{place} a  b\n")
