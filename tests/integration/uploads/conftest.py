"""Fixtures of the daemons that upload."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.daemon import DaemonProcess
from tests.kit.objects.service import Bucket


@pytest.fixture(autouse=True)
def _environment(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def made() -> Iterator[list[DaemonProcess]]:
    """Daemons that do not outlive the test."""
    found: list[DaemonProcess] = []
    yield found
    for daemon in found:
        daemon.process.kill()
        daemon.process.wait()
