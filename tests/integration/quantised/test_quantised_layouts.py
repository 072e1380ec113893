"""Quantised tensors of torchao and TransformerEngine, captured by a job, are read back as the values they stand for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import capd
from capd.errors import CapdError
from capd.store.read.store import Store
from tests.kit import forking
from tests.kit.jobs.products import assert_products_hold
from tests.kit.paths import REPOSITORY

pytest.importorskip("torchao")

from tests.integration.quantised import te_cases, torchao_cases

pytestmark = pytest.mark.timeout(200)
NAMES = [*torchao_cases.CASES, *te_cases.CASES]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that a job left: its run, and what it expects."""
    directory = tmp_path_factory.mktemp("native")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CAPD_")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "CAPD_POLICY": "block", "CAPD_STRICT": "1"}
    script = [sys.executable, "-m", "tests.integration.quantised.native_job", str(directory)]
    done = forking.run(
        [sys.executable, "-m", "capd", "run", "--store", directory, "--run-id", "job", "--", *script],
        env=environment, capture_output=True, text=True, timeout=180, inner=forking.TRAINING,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_products_hold(directory / "job.zarr", none="tensors are captured by name, and of no module")
    return directory


@pytest.fixture(scope="module")
def store(job: Path) -> Store:
    return capd.open(job / "job.zarr")


@pytest.fixture(scope="module")
def expected(job: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(job / "expected.pt", weights_only=True)
    return found


def parts_of(store: Store, name: str) -> list[capd.store.read.series.Series]:
    return [series for series in store.series if series.key.tensor_name.startswith(f"{name}.")]


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Bit for bit; any NaN is a NaN."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    kind = {2: torch.int16, 4: torch.int32}[wanted.element_size()]
    assert torch.equal(found.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    assert torch.equal(found[numbers].view(kind), wanted[numbers].view(kind))


@pytest.mark.parametrize("name", NAMES)
def test_the_values_are_those_of_the_library_bit_for_bit_from_whichever_part(
    store: Store, expected: dict[str, torch.Tensor], name: str
) -> None:
    parts = parts_of(store, name)
    assert len(parts) >= 2
    for series in parts:
        assert [len(series), series.kept] == [2, "tensor"]
        for i in range(2):
            assert_same(series.torch(i, dequantise=True), expected[name])


@pytest.mark.parametrize("name", te_cases.REFUSED)
def test_what_the_layout_does_not_settle_is_refused_and_named(store: Store, name: str) -> None:
    says = te_cases.REFUSED[name][1]
    for series in parts_of(store, name):
        with pytest.raises(CapdError, match=says) as refused:
            series.torch(0, dequantise=True)
        assert f"{series.path}#0" in str(refused.value)


def test_a_tensor_whose_library_is_wrong_about_its_shape_is_refused(store: Store) -> None:
    for series in parts_of(store, "one_row"):
        with pytest.raises(CapdError, match="do not fit together"):
            series.torch(0, dequantise=True)


def test_a_region_is_one_of_the_values(store: Store, expected: dict[str, torch.Tensor]) -> None:
    series = parts_of(store, "mx_e2m1_turned")[0]

    found = series.torch(0, (slice(3, 50, 2), 1), dequantise=True)

    assert_same(found, expected["mx_e2m1_turned"][3:50:2, 1])
    assert found.untyped_storage().nbytes() == found.numel() * 2


def test_parts_with_a_label_of_the_users_find_each_other(
    store: Store, expected: dict[str, torch.Tensor]
) -> None:
    for series in parts_of(store, "labelled"):
        assert series.key.quant_type == "mine"
        assert_same(series.torch(0, dequantise=True), expected["mx_e4m3_turned"])
