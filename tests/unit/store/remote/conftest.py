"""What the tests of runs in object stores share: a place below a real S3 server."""

from __future__ import annotations

import pytest

from capd.store.objects.address import Address, parse_address
from tests.kit.objects.service import Bucket


@pytest.fixture
def prefix(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Address:
    """A prefix in a bucket of the test's own. The environment leads there."""
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    return parse_address(bucket.url("runs"))
