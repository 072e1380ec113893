"""The failures of obstore as errors of capd."""

from __future__ import annotations

import pytest

from capd.errors import ObjectStoreError
from capd.store.objects.address import parse_address
from capd.store.objects.failures import translated


class PanicException(BaseException):
    """What Rust code raises when it panics; PyO3's class cannot be made here."""


def test_a_panic_of_obstore_is_an_error_of_the_store() -> None:
    with (
        pytest.raises(ObjectStoreError, match="obstore failed \\(index out of bounds\\)") as caught,
        translated(parse_address("s3://bucket/run.zarr")),
    ):
        raise PanicException("index out of bounds")
    assert caught.value.retry


def test_ctrl_c_stays_what_it_is() -> None:
    with pytest.raises(KeyboardInterrupt), translated(parse_address("s3://bucket/run.zarr")):
        raise KeyboardInterrupt
