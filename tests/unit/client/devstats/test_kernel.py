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

from capd_client.devstats import ROW_DTYPES, fill_rows, has_kernel, prepare, prepared
from capd_client.devstats.formulas import fill_from_values
from capd_client.devstats.prepared import fill_on_device
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.statistics_row import ROW_VALUES
from tests.kit.client.statistics_rows import Bits, any_bits, assert_row, ordinary, reference, tensor_of

HERE = torch.device("cpu")  # stands in for a device
NAMES = sorted(str(dtype).removeprefix("torch.") for dtype in ROW_DTYPES)


Rows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class Kernel(ModuleType):
    """In the place of the launches: computes `rows`, and remembers how many tensors each call had."""

    ALIGNMENT = 16
    COMPILED = True

    def __init__(self, rows: Rows) -> None:
        super().__init__("capd_client.devstats.launching")
        self._rows = rows
        self.launched: list[tuple[str, int]] = []

    @property
    def calls(self) -> int:
        return len(self.launched)

    def fill_from_kernel(
        self, words: list[torch.Tensor], rows: list[torch.Tensor], dtype: str, table: torch.Tensor
    ) -> None:
        self.launched.append((dtype, len(words)))
        for flat, row in zip(words, rows, strict=True):
            self._rows(flat, table, row)


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

    def put(rows: Rows) -> Kernel:
        kernel = Kernel(rows)
        monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
        monkeypatch.setattr("capd_client.devstats.launching", kernel, raising=False)
        return kernel

    monkeypatch.setattr(prepared, "_tables", {})
    monkeypatch.setattr(prepared, "installed", lambda: True)
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
        assert current[0].device == flat.device
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


def test_many_tensors_take_one_launch_for_each_dtype(install: Callable[..., Kernel]) -> None:
    kernel = install(right)
    prepare(HERE)
    kernel.launched.clear()
    odd = torch.arange(9, dtype=torch.float32)[1:]
    samples = [("float32", 5), ("bfloat16", 4099), ("int32", 7), ("float32", 3001), ("float8_e5m2", 17)]
    made = [(name, any_bits(name, count)) for name, count in samples]
    rows = torch.full((len(made) + 1, ROW_VALUES), 7.5, dtype=torch.float64)

    fill_rows(
        [
            *((tensor_of(bits, name), row) for (name, bits), row in zip(made, rows, strict=False)),
            (odd, rows[-1]),
        ]
    )

    assert kernel.launched == [("float32", 2), ("bfloat16", 1), ("float8_e5m2", 1)]
    for (name, bits), row in zip(made, rows, strict=False):
        assert_row(row.numpy(), reference(bits, name), bits, name)
    assert rows[-1, :2].tolist() == [8, 0]
    assert rows[-1, 7] == sum(range(9))


def test_only_the_dtypes_that_are_asked_for_are_prepared_in_their_order(
    install: Callable[..., Kernel],
) -> None:
    kernel = install(right)
    prepare(HERE, dtypes=[torch.float8_e4m3fn, torch.int32, torch.float32, torch.float32])
    assert list(dict.fromkeys(name for name, _ in kernel.launched)) == ["float8_e4m3fn", "float32"]
    assert [dtype for _, dtype in prepared._tables] == [torch.float8_e4m3fn, torch.float32]


def test_nothing_is_loaded_before_it_may_be(
    install: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = install(right)
    answers = iter([False, False, True, True, False, False, True])
    calls_when_asked = []

    def may_load() -> bool:
        calls_when_asked.append(kernel.calls)
        return next(answers)

    monkeypatch.setattr(prepared, "_LOOK_S", 0.001)
    prepare(HERE, dtypes=[torch.bfloat16, torch.float32], may_load=may_load)

    trial = kernel.calls // 2
    assert calls_when_asked == [0, 0, 0, 0, trial, trial, trial]
    assert next(answers, None) is None
    assert has_kernel(HERE, torch.float32)


def test_waiting_to_load_ends_when_it_is_not_wanted_any_more(install: Callable[..., Kernel]) -> None:
    kernel = install(right)
    asked = iter([False, False, True])
    prepare(HERE, lambda: next(asked), may_load=lambda: False)
    assert kernel.calls == 0


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
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(prepared, "_tables", {})

    prepare(HERE)

    assert prepared._tables == {}
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("how", ["environment", "setting"])
def test_where_triton_interprets_no_device_is_given_its_kernel(
    install: Callable[..., Kernel],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """A job that debugs kernels of its own would wait in every capture for the host to go through the tensor."""
    kernel = install(right)
    kernel.COMPILED = how == "environment"
    compiled: list[str] = []
    monkeypatch.setattr(prepared, "target_of", lambda device: "cuda:90:32")
    monkeypatch.setattr(prepared, "compile_ahead", lambda target, *_: compiled.append(target) or True)
    monkeypatch.setattr(prepared, "missing", lambda *_: [])
    monkeypatch.setattr(prepared, "_trial_stream", lambda *_: contextlib.nullcontext())
    if how == "environment":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    prepare(torch.device("cuda", 0))
    assert bool(compiled) is (how == "setting")
    assert prepared._tables == {}
    assert kernel.calls == 0
    assert warnings_of(caplog) == []


SCRIPT = """
import sys, numpy, torch
from capd_client.devstats import fill_rows, prepare, prepared
from capd_client.devstats.launching import fill_from_kernel
from capd_client.devstats.tables import values_of_codes
from capd_client.protocol.statistics_row import ROW_VALUES
prepare(torch.device("cpu"))
proved = [str(dtype) for _, dtype in prepared._tables]
samples, rows = numpy.load(sys.argv[1]), {"proved": numpy.array(proved)}
tensors = {name: torch.from_numpy(samples[name]).view(getattr(torch, name.split("/")[0])) for name in samples.files}
filled = torch.full((len(tensors), ROW_VALUES), 7.5, dtype=torch.float64)
fill_rows(list(zip(tensors.values(), filled)))
for (name, words), row in zip(tensors.items(), filled):
    rows["all/" + name] = row.numpy()
    table = torch.empty((0, 0))
    if words.element_size() == 1:
        table = values_of_codes(words.dtype, words.device)
        words = words.view(torch.uint8)
    elif words.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        continue
    row = torch.full((ROW_VALUES,), 7.5, dtype=torch.float64)
    fill_from_kernel([words], [row], name.split("/")[0], table)
    rows["one/" + name] = row.numpy()
numpy.savez(sys.argv[2], **rows)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton (1 GB) is not installed")
def test_the_triton_kernel_equals_numpy_in_float64(tmp_path: Path) -> None:
    samples = {
        f"{dtype}/{make.__name__}/{count}": make(dtype, count)
        for dtype in NAMES
        for make in (ordinary, any_bits)
        for count in (1, 4095, 4096, 5000)
    } | {f"{dtype}/any_bits/70000": any_bits(dtype, 70_000) for dtype in NAMES}
    np.savez(tmp_path / "samples.npz", **{name: bits.view(np.uint8) for name, bits in samples.items()})

    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, tmp_path / "samples.npz", tmp_path / "rows.npz"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
        timeout=110,
    )

    rows = np.load(tmp_path / "rows.npz")
    proved = {str(name).removeprefix("torch.") for name in rows["proved"]}
    floats_of_8_bits = {name for name in NAMES if ITEM_NBYTES[name] == 1 and name.startswith("float")}
    assert proved == floats_of_8_bits | {"bfloat16", "float16", "float32"}
    for name, bits in samples.items():
        dtype = name.split("/")[0]
        assert_row(rows[f"all/{name}"], reference(bits, dtype), bits, dtype)
        if dtype in proved:  # whatever else was launched with it
            assert rows[f"all/{name}"].tobytes() == rows[f"one/{name}"].tobytes()
        elif ITEM_NBYTES[dtype] == 1:
            assert_row(rows[f"one/{name}"], reference(bits, dtype), bits, dtype)
