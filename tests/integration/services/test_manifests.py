"""The files of deploy/ that other programs read: manifests, the Dockerfile, the Apptainer recipe, shell scripts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.paths import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
KUBERNETES = "1.33"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def program(name: str) -> str:
    """A program of the environment, or of the system; skips where it is missing."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    return found or pytest.skip(f"{name} is missing")


def pod(manifest: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(manifest.read_text())["spec"]["template"]["spec"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_knows_every_member_of_a_manifest(manifest: Path, tmp_path: Path) -> None:
    pytest.importorskip("kubernetes_validate")
    validate = [sys.executable, "-m", "kubernetes_validate", "-k", KUBERNETES, "--strict"]

    done = run(*validate, str(manifest))
    assert done.returncode == 0, done.stdout + done.stderr
    # The validator does judge: a misspelt member is one too many.
    wrong = tmp_path / manifest.name
    wrong.write_text(manifest.read_text().replace("terminationGracePeriodSeconds", "terminationGracePeriod"))
    assert run(*validate, str(wrong)).returncode != 0


@pytest.mark.slow
def test_kubernetes_knows_every_member_of_the_pod_on_the_page(tmp_path: Path) -> None:
    pytest.importorskip("kubernetes_validate")
    text = (REPOSITORY / "docs" / "cluster.md").read_text()
    [block] = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(block.splitlines()) <= 15
    shown = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train"}, **yaml.safe_load(block)}
    manifest = tmp_path / "pod.yaml"
    manifest.write_text(yaml.safe_dump(shown))

    done = run(sys.executable, "-m", "kubernetes_validate", "-k", KUBERNETES, "--strict", str(manifest))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_the_daemon_of_a_pod_ends_within_its_grace_period(manifest: Path) -> None:
    spec = pod(manifest)
    daemons = [
        one
        for one in [*spec.get("initContainers", []), *spec["containers"]]
        if "serve" in one.get("args", [])
    ]

    [daemon] = daemons
    settings = {one["name"]: one.get("value") for one in daemon["env"]}
    assert 2 * spec["terminationGracePeriodSeconds"] > 3 * float(settings["CAPD_SHUTDOWN_TIMEOUT_S"]) - 1
    assert "hostUsers" not in spec
    assert daemon["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_sidecar_needs_no_right_on_the_node_and_shares_the_uid() -> None:
    spec = pod(DEPLOY / "kubernetes" / "sidecar.yaml")
    [daemon], [job] = spec["initContainers"], spec["containers"]

    assert daemon["restartPolicy"] == "Always"
    assert not any("hostPath" in volume for volume in spec["volumes"])
    assert "runAsUser" in spec["securityContext"]
    assert not any("runAsUser" in one["securityContext"] for one in (daemon, job))
    endpoint = next(one["value"] for one in job["env"] if one["name"] == "CAPD_ENDPOINT")
    assert endpoint in daemon["args"]


def test_hadolint_has_nothing_against_the_dockerfile() -> None:
    done = run(program("hadolint"), str(DEPLOY / "docker" / "Dockerfile"))

    assert (done.returncode, done.stdout) == (0, "")


def test_the_images_take_files_that_are_there() -> None:
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    recipe = (DEPLOY / "apptainer" / "capd.def").read_text()
    copied = [
        word
        for line in re.findall(r"^COPY (?!--)(.*)$", dockerfile, re.MULTILINE)
        for word in line.split()[:-1]
    ]
    taken = [
        line.split()[0] for line in re.findall(r"^%files\n((?: .*\n)+)", recipe, re.MULTILINE)[0].splitlines()
    ]

    assert sorted(copied) == sorted(taken)
    assert all((REPOSITORY / name).exists() for name in copied)
    kept = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} == {line for line in kept if line.startswith("!")}


@pytest.mark.parametrize(
    "script", sorted([*(DEPLOY / "slurm").iterdir()]), ids=lambda path: path.name
)  # fmt: skip
def test_shellcheck_has_nothing_against_a_script(script: Path) -> None:
    done = run(program("shellcheck"), str(script))

    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("section", ["post", "runscript", "test"])
def test_shellcheck_has_nothing_against_the_apptainer_recipe(section: str, tmp_path: Path) -> None:
    recipe = (DEPLOY / "apptainer" / "capd.def").read_text()
    [body] = re.findall(rf"^%{section}\n((?: .*\n|\n)+)", recipe, re.MULTILINE)
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\n{body}")
    # The recipe's shell stops at the first error.
    done = run(program("shellcheck"), "--exclude=SC2164", str(script))

    assert (done.returncode, done.stdout) == (0, "")
