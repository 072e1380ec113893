"""What tensor_saver's calls recorded is found: dY under both of its names, a record by its reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import capd
from capd.errors import CapdError
from capd_client.errors import ConfigError
from capd_client.protocol.key import Moment
from capd_client.protocol.reference import reference_of
from tests.kit.store.writing import Writer, key

X, DY = key("input", operation="forward"), key("input", operation="backward")
OWN = key("grad_output", operation="backward", module="blocks.0")


def numbers(n: int) -> NDArray[np.float32]:
    return np.full((2, 2), n, np.float32)


@pytest.fixture
def store(tmp_path: Path) -> capd.Store:
    writer = Writer(tmp_path)
    for n in range(3):
        for one in (X, DY, OWN):
            writer.put(one, "float32", numbers(n), iteration=n // 2, micro_batch=n % 2, sample_idx=n)
    writer.put(X, "float32", numbers(9), attempt=1, sample_idx=0)
    writer.close()
    return capd.open(writer.run)


def found(store: capd.Store, **names: object) -> set[tuple[str, str]]:
    return {(series.key.tensor_name, series.key.operation) for series in store.find(**names)}


def test_grad_output_finds_the_input_of_a_backward_and_not_the_other_way_round(store: capd.Store) -> None:
    both = {("input", "backward"), ("grad_output", "backward")}

    assert found(store, tensor_name="grad_output") == both
    assert found(store, tensor_name=["grad_output", "query"], operation="backward") == both
    assert found(store, tensor_name="grad_output", operation="forward") == set()
    assert found(store, tensor_name="grad_output", module="blocks.0") == {("grad_output", "backward")}
    assert found(store, tensor_name="input") == {("input", "forward"), ("input", "backward")}
    assert found(store, tensor_name="input", operation="backward") == {("input", "backward")}


def test_a_reference_finds_the_one_record_of_its_moment_and_attempt(store: capd.Store) -> None:
    series, index = store.record(reference_of(DY, Moment(iteration=1, micro_batch=0, sample_idx=2)))
    assert (series.key, series.numpy(index).flat[0]) == (DY, 2)

    for attempt, value in ((0, 0), (1, 9)):
        series, index = store.record(reference_of(X, Moment(attempt=attempt, sample_idx=0)))
        assert (series.key, series.numpy(index).flat[0]) == (X, value)


def test_a_reference_of_another_run_or_none_is_refused(store: capd.Store) -> None:
    with pytest.raises(CapdError, match="has no record"):
        store.record(reference_of(X, Moment(iteration=7, sample_idx=0)))
    with pytest.raises(ConfigError, match="no reference"):
        store.record(
            "20241201_143022_0001_iter000_linear_L0_forward_post_linear_bf16_rank0_sample0_output.pt"
        )
