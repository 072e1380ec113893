"""The fixtures of an S3 server, for every folder of tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.objects.keeper import shared_server
from tests.kit.objects.proxy import FaultProxy
from tests.kit.objects.server import S3Server, why_no_server
from tests.kit.objects.service import Bucket, S3Service

__all__ = ["bucket", "fault_proxy", "own_s3_server", "s3_server"]


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Service]:
    """The S3 server that all processes of this run share: nobody may stop it."""
    _skip_without_server()
    own = tmp_path_factory.getbasetemp()
    place = own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own
    with shared_server(place / "s3") as service:
        yield service


@pytest.fixture
def bucket(s3_server: S3Service) -> Iterator[Bucket]:
    """A bucket of the test's own on the shared server."""
    made = s3_server.make_bucket()
    yield made
    s3_server.drop_bucket(made.name)


@pytest.fixture
def own_s3_server() -> Iterator[S3Server]:
    """A server that the test may stop and start; it takes four seconds to start."""
    _skip_without_server()
    server = S3Server(Path(tempfile.mkdtemp(prefix="capd-s3-", dir="/tmp")))
    try:
        yield server.start()
    finally:
        server.discard()


@pytest.fixture
def fault_proxy(s3_server: S3Service) -> Iterator[FaultProxy]:
    """A proxy before the shared server, which fails as the test tells it: `bucket.through(fault_proxy)`."""
    with FaultProxy(s3_server.endpoint) as made:
        yield made


def _skip_without_server() -> None:
    reason = why_no_server()
    if reason:
        pytest.skip(reason)
