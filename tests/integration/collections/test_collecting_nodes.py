"""What stands in for a collection on several nodes works as printed: two of them here, each with its own daemon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import capd
from tests.kit.paths import REPOSITORY
from tests.kit.processes import daemons_on

JOB = f"{REPOSITORY}/tests/integration/collections/collect_ranks_job.py ddp 4"
NODES = 2

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Of every node. What Slurm would answer is answered by two scripts."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, lines in {
        "scontrol": "echo 127.0.0.1",
        "srun": "for node in 0 1; do SLURM_NODEID=$node CAPD_NODE=node$node "
        'CAPD_ENDPOINT=unix:$XDG_RUNTIME_DIR/$node.sock "$@" & jobs="${jobs-} $!"; done\n'
        "for job in $jobs; do wait $job || exit; done",
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tools / name).chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {
        **os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HEAD": "127.0.0.1",
        "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "here",
    }  # fmt: skip


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Nodes that do not outlive the test."""
    found: list[subprocess.Popen[str]] = []
    yield found
    for node in found:
        node.kill()
        node.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def block(number: int, store: Path) -> str:
    """A block of the example's README, with this job in the place of a cluster's."""
    text = (REPOSITORY / "examples" / "megatron" / "README.md").read_text()
    script = text[text.index("## On a GPU cluster") :].split("```bash\n")[number].split("```")[0]
    for cluster, here in {
        "/shared/captures": str(store),
        "--nproc-per-node 8": "--nproc-per-node 1",
        "pretrain_gpt.py …": JOB,
        "29500": str(free_port()),
    }.items():
        assert cluster in script
        script = script.replace(cluster, here)
    return script.replace("unix:/tmp/capd-$USER.sock", "unix:$XDG_RUNTIME_DIR/$NODE_RANK.sock")


def run(script: str, started: list[subprocess.Popen[str]], *each: dict[str, str]) -> list[str]:
    """Run a script on every node at once, which must end well; returns what was said on each."""
    started.extend(
        subprocess.Popen(
            ["bash", "-e", "-c", script], env=one, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for one in each
    )
    said = [node.communicate(timeout=140)[0] for node in started]
    assert [node.returncode for node in started] == [0] * len(each), "\n".join(said)
    return said


def nodes_of(environ: dict[str, str]) -> list[dict[str, str]]:
    return [{**environ, "NODE_RANK": str(node), "CAPD_NODE": f"node{node}"} for node in range(NODES)]


def assert_collected(run_path: Path, *, emulated: bool = False) -> None:
    """Both ranks, each from its own node, have two micro-batches of the first iteration and one of the second."""
    store = capd.open(run_path)
    for rank in range(NODES):
        found = store.find(rank=rank, quant_type="mxfp8", tensor_name="input")
        assert [[(r.iteration, r.micro_batch) for r in series.records] for series in found] == [
            [(0, 0), (0, 1), (1, 0)]
        ] * 2
        assert {series.attributes["emulation"] != "none" for series in found} == {emulated}
    assert len(list(run_path.glob(".capd/node=*"))) == NODES
    assert daemons_on(run_path.parent) == []


@pytest.mark.fault
def test_the_launch_lines_of_the_example(
    environ: dict[str, str], started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    run(block(1, tmp_path / "store"), started, *nodes_of(environ))

    assert_collected(tmp_path / "store" / "llama-mxfp8.zarr")


@pytest.mark.fault
def test_the_batch_script_of_the_example(
    environ: dict[str, str], started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    run(block(2, tmp_path / "store"), started, {**environ, "SLURM_NNODES": str(NODES)})

    assert_collected(tmp_path / "store" / "slurm-77.zarr")


@pytest.mark.fault
@pytest.mark.parametrize(("flag", "emulated"), [("", True), ("--label-only", False)])
def test_the_remedy_that_a_refused_collection_names(
    flag: str, emulated: bool, environ: dict[str, str], started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    torchrun = (
        f"torchrun --nnodes {NODES} --nproc-per-node 1 --node-rank $NODE_RANK --master-addr $HEAD "
        f"--master-port {free_port()} {JOB}"
    )
    refused = subprocess.run(
        ["bash", "-c", f"NODE_RANK=0 capd run --mode quick {flag} -- {torchrun}"],
        env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert refused.returncode == 2
    remedy = refused.stderr.split("run each type by itself: ")[1].strip()
    for word, here in {
        "N/M": "3/2",
        "NAME": "n",
        "--quant-type T": "--quant-type mxfp8",
        "…": torchrun,
    }.items():
        assert word in remedy
        remedy = remedy.replace(word, here)

    run(remedy, started, *({**one, "CAPD_STORE": str(tmp_path / "store")} for one in nodes_of(environ)))

    assert_collected(tmp_path / "store" / "n.zarr", emulated=emulated)
