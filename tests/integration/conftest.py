"""A daemon and ranks that do not outlive their test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.embedded.embedded_job import Job, StartJob
from tests.kit.processes import Daemon, Rank, StartRank, daemons_on


@pytest.fixture
def daemon(tmp_path: Path, runtime_dir: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "store", runtime_dir).start()
    yield daemon
    daemon.discard()


@pytest.fixture
def start_rank(daemon: Daemon) -> Iterator[StartRank]:
    """Starts ranks that do not outlive the test."""
    started: list[Rank] = []

    def start(number: int = 0, **settings: Any) -> Rank:
        started.append(Rank(daemon.endpoint, number, **settings))
        return started[-1]

    yield start
    for rank in started:
        rank.kill()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For oracles whose job had one: a product's last bits may depend on how many threads compute it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[StartJob]:
    """Starts jobs; neither they nor their daemons outlive the test."""
    jobs: list[Job] = []

    def start(*prefix: str, **environment: str) -> Job:
        jobs.append(Job(tmp_path, *prefix, **environment))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.kill()
    for pid in daemons_on(tmp_path / "enhanced_tensor_logs"):
        os.kill(pid, signal.SIGKILL)
