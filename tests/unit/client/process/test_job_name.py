"""The name that the ranks of a job derive for its run."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from capd_client.process.ranks import job_name, spans_nodes

ONE_NODE = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
TWO_NODES = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
NAME = "from capd_client.process.ranks import job_name; print(job_name({'TORCHELASTIC_RUN_ID': 'x'}))"


def test_the_ranks_of_one_agent_have_one_name_and_those_of_another_another() -> None:
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    agent = f"import subprocess, sys; [subprocess.run([sys.executable, '-c', {NAME!r}]) for _ in range(2)]"
    run = functools.partial(subprocess.run, env=path, capture_output=True, text=True, timeout=60)
    names = [run([sys.executable, "-c", agent]).stdout.split() for _ in range(2)]

    assert [len(set(of_agent)) for of_agent in names] == [1, 1]
    assert names[0] != names[1]
    assert all(name.startswith("job-") for of_agent in names for name in of_agent)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"RANK": "0", "LOCAL_RANK": "0"}, None),
        ({**TWO_NODES, "TORCHELASTIC_RUN_ID": "none"}, None),
        ({**TWO_NODES, "TORCHELASTIC_RUN_ID": "exp 7/b"}, "exp-7-b"),
        ({**TWO_NODES, "TORCHELASTIC_RUN_ID": "../.."}, None),
        ({**TWO_NODES, "TORCHELASTIC_RUN_ID": "x" * 200}, "x" * 128),
    ],
)
def test_on_several_nodes_it_is_the_id_that_all_know(environ: dict[str, str], expected: str | None) -> None:
    assert job_name(environ) == expected


def test_several_nodes_are_told_by_the_sizes() -> None:
    assert spans_nodes(TWO_NODES)
    assert not spans_nodes(ONE_NODE)
    assert not spans_nodes({"WORLD_SIZE": "4"})
    assert not spans_nodes({"WORLD_SIZE": "many", "LOCAL_WORLD_SIZE": "2"})
