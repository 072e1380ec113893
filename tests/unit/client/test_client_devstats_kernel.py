"""The kernel of a device: it proves itself before it is used, and a failing one costs nothing but speed."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from statistics_rows import Bits, any_bits, assert_row, ordinary, reference, tensor_of

from capd_client.devstats import ROW_DTYPES, has_kernel, prepare, prepared
from capd_client.devstats.formulas import fill_from_values
from capd_client.devstats.prepared import fill_on_device
from capd_client.dtypes import ITEM_NBYTES
from capd_client.statistics_row import ROW_VALUES

HERE = torch.device("cpu")  # stands in for a device
NAMES = sorted(str(dtype).removeprefix("torch.") for dtype in ROW_DTYPES)


class Kernel(ModuleType):
    """In the place of the Triton kernel: computes `rows`, and counts the calls."""

    ALIGNMENT = 16
    COMPILED = True

    def __init__(self, rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__("capd_client.devstats.kernel")
        self._rows = rows
        self.calls = 0

    def fill_from_kernel(self, words: torch.Tensor, table: torch.Tensor, row: torch.Tensor) -> None:
        self.calls += 1
        self._rows(words, table, row)


def right(words: torch.Tensor, table: torch.Tensor, row: torch.Tensor) -> None:
    values = table[words.to(torch.int32)].flatten() if table.numel() else words
    fill_from_values(values, row, blind=True)


def wrong(words: torch.Tensor, table: torch.Tensor, row: torch.Tensor) -> None:
    right(words, table, row)
    row[-2] += 1


def broken(words: torch.Tensor, table: torch.Tensor, row: torch.Tensor) -> None:
    raise RuntimeError("no such instruction")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernel]:
    """Puts a kernel where `prepare` finds it."""

    def put(rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]) -> Kernel:
        kernel = Kernel(rows)
        monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
        monkeypatch.setattr("capd_client.devstats.kernel", kernel, raising=False)
        return kernel

    monkeypatch.setattr(prepared, "_tables", {})
    return put


def row_here(bits: Bits, dtype: str) -> np.ndarray:
    row = torch.empty(ROW_VALUES, dtype=torch.float64)
    fill_on_device(tensor_of(bits, dtype), row)
    return row.numpy()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_kernel_that_proved_itself_is_used(install: Callable[..., Kernel]) -> None:
    kernel = install(right)
    before = row_here(ordinary("float32"), "float32")
    assert kernel.calls == 0  # nothing was compiled for a training thread
    prepare(HERE)
    tried = kernel.calls

    for dtype in ("float32", "bfloat16", "float16", "float8_e4m3fn", "float4_e2m1fn_x2"):
        bits = any_bits(dtype)
        assert_row(row_here(bits, dtype), reference(bits, dtype), bits, dtype)

    assert kernel.calls == tried + 5
    assert before[0] == 3001


def test_the_kernel_is_launched_on_the_device_of_the_tensor(
    install: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[torch.Tensor] = []

    @contextlib.contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    def checked(flat: torch.Tensor, table: torch.Tensor, row: torch.Tensor) -> None:
        assert len(current) == 1
        assert current[0].data_ptr() == flat.data_ptr()
        right(flat, table, row)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    kernel = install(checked)
    prepare(HERE)
    tried = kernel.calls
    bits = any_bits("bfloat16")
    assert_row(row_here(bits, "bfloat16"), reference(bits, "bfloat16"), bits, "bfloat16")
    assert kernel.calls == tried + 1
    assert has_kernel(HERE, torch.bfloat16)


def test_what_is_not_wanted_any_more_is_not_compiled(install: Callable[..., Kernel]) -> None:
    install(right)
    prepare(HERE, lambda: bool(prepared._tables))
    assert has_kernel(HERE, torch.bfloat16)  # the first one
    assert len(prepared._tables) == 1


def test_what_the_kernel_is_not_for_goes_another_way(install: Callable[..., Kernel]) -> None:
    kernel = install(right)
    prepare(HERE)
    tried = kernel.calls

    row_here(any_bits("int32"), "int32")
    row_here(ordinary("float32")[:0], "float32")
    row = torch.empty(ROW_VALUES, dtype=torch.float64)
    fill_on_device(torch.arange(9, dtype=torch.float32)[1:], row)  # a view that begins at 4 bytes

    assert kernel.calls == tried
    assert row[7] == sum(range(9))


@pytest.mark.parametrize("rows", [wrong, broken])
def test_a_kernel_that_fails_its_trial_is_never_used(
    rows: Callable[..., None], install: Callable[..., Kernel], caplog: pytest.LogCaptureFixture
) -> None:
    kernel = install(rows)

    prepare(HERE)

    tried = kernel.calls
    bits = ordinary("bfloat16")
    assert_row(row_here(bits, "bfloat16"), reference(bits, "bfloat16"), bits, "bfloat16")
    assert kernel.calls == tried
    [line] = warnings_of(caplog)
    assert "the Triton kernel failed" in line


def test_a_kernel_that_fails_later_is_given_up_and_told_once(
    install: Callable[..., Kernel], caplog: pytest.LogCaptureFixture
) -> None:
    kernel = install(right)
    prepare(HERE)
    kernel._rows = broken
    tried = kernel.calls

    for _ in range(3):
        bits = any_bits("float32")
        assert_row(row_here(bits, "float32"), reference(bits, "float32"), bits, "float32")

    assert kernel.calls == tried + 1
    assert len(warnings_of(caplog)) == 1


def test_without_triton_nothing_is_said(
    install: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "capd_client.devstats.kernel", raising=False)

    prepare(HERE)

    assert prepared._tables == {}
    assert warnings_of(caplog) == []


def test_where_triton_interprets_no_device_is_given_its_kernel(
    install: Callable[..., Kernel], caplog: pytest.LogCaptureFixture
) -> None:
    """A job that debugs kernels of its own would wait in every capture for the host to go through the tensor."""
    kernel = install(right)
    kernel.COMPILED = False
    prepare(torch.device("cuda", 0))
    assert prepared._tables == {}
    assert kernel.calls == 0
    assert warnings_of(caplog) == []


SCRIPT = """
import sys, numpy, torch
from capd_client.devstats.kernel import fill_from_kernel
from capd_client.devstats.tables import values_of_codes
from capd_client.devstats import prepare, prepared
from capd_client.statistics_row import ROW_VALUES
prepare(torch.device("cpu"))
proved = [str(dtype) for _, dtype in prepared._tables]
samples, rows = numpy.load(sys.argv[1]), {"proved": numpy.array(proved)}
for name in samples.files:
    dtype = getattr(torch, name.split("/")[0])
    words = torch.from_numpy(samples[name]).view(dtype)
    table = torch.empty((0, 0))
    if dtype.itemsize == 1:
        words, table = words.view(torch.uint8), values_of_codes(dtype, words.device)
    row = torch.full((ROW_VALUES,), 7.5, dtype=torch.float64)
    fill_from_kernel(words, table, row)
    rows[name] = row.numpy()
numpy.savez(sys.argv[2], **rows)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton (1 GB) is not installed")
def test_the_triton_kernel_equals_numpy_in_float64(tmp_path: Path) -> None:
    samples = {
        f"{dtype}/{make.__name__}/{count}": make(dtype, count)
        for dtype in NAMES
        for make in (ordinary, any_bits)
        for count in (1, 1023, 1024, 5000)
    }
    np.savez(tmp_path / "samples.npz", **{name: bits.view(np.uint8) for name, bits in samples.items()})

    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, tmp_path / "samples.npz", tmp_path / "rows.npz"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
        timeout=110,
    )

    rows = np.load(tmp_path / "rows.npz")
    for name, bits in samples.items():
        dtype = name.split("/")[0]
        assert_row(rows[name], reference(bits, dtype), bits, dtype)
    floats_of_8_bits = {name for name in NAMES if ITEM_NBYTES[name] == 1 and name.startswith("float")}
    assert {str(name).removeprefix("torch.") for name in rows["proved"]} == floats_of_8_bits | {
        "bfloat16",
        "float16",
        "float32",
    }
