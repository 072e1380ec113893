"""Records that are no whole quantised tensor, through a real daemon: an error that says why, never a wrong value."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import capd
from capd.errors import CapdError
from capd.store.read.series import Series
from capd.store.read.store import Store
from capd_client.config.settings import ClientConfig
from capd_client.protocol.key import Key, Moment
from capd_client.session.session import Session
from tests.kit.processes import Daemon

mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
from tests.integration.quantised import (  # noqa: E402 - they need torchao, too
    te_cases,
    te_tensors,
)

Save = Callable[..., Store]


@pytest.fixture
def save(daemon: Daemon) -> Save:
    """Captures the tensors, at moments of their own, and opens the store."""

    def save(*tensors: tuple[str, torch.Tensor], **settings: Any) -> Store:
        config = ClientConfig(endpoint=str(daemon.socket), run_id="run", **settings)
        session = Session(config, environ={})
        for iteration, (name, tensor) in enumerate(tensors):
            session.offer(tensor, Key(quant_type="mine", rank=0, tensor_name=name), Moment(iteration))
        assert session.close(30)
        daemon.stop()
        return capd.open(daemon.store / "run.zarr")

    return save


def mxfp8(rows: int) -> torch.Tensor:
    values = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(rows)).bfloat16()
    tensor: torch.Tensor = mx.MXTensor.to_mx(values, torch.float8_e4m3fn, block_size=32)
    return tensor


def nvfp4() -> Any:
    return te_cases.CASES["te_nvfp4_rowwise_True"]()[0]


def part_of(store: Store, name: str) -> Series:
    return next(series for series in store.series if series.key.tensor_name.startswith(f"{name}."))


def test_a_plain_record_reads_as_ever(save: Save) -> None:
    store = save(("plain", torch.arange(4.0)))

    (series,) = store.find(tensor_name="plain")
    assert torch.equal(series.torch(0, dequantise=True), torch.arange(4.0))


def test_what_its_class_said_must_be_known_and_readable(save: Save) -> None:
    unread, strange = nvfp4(), te_tensors._class("StrangeTensor", "strange")
    unread._options = {**unread._options, (1, 2): 3}  # a key that JSON does not have
    other = strange((2,), torch.bfloat16, {"_data": torch.ones(2)}, {})
    store = save(("unread", unread), ("other", other), strict=True)

    for name, why in {
        "unread": "the context from its class cannot be read",
        "other": "cannot dequantise a transformer_engine.pytorch.tensor.strange.StrangeTensor; it can torchao's",
    }.items():
        with pytest.raises(CapdError, match=why):
            part_of(store, name).torch(0, dequantise=True)
        part_of(store, name).torch(0)  # as captured


def test_a_damaged_part_is_named(save: Save, daemon: Daemon) -> None:
    store = save(("x", nvfp4()), strict=True)
    scale = store.find(tensor_name="x.rowwise_scale_inv")[0]
    [shard] = (
        path for path in (daemon.store / "run.zarr" / scale.path / "data" / "c").rglob("*") if path.is_file()
    )
    shard.write_bytes(b"\0" * 64)

    with pytest.raises(CapdError, match="rowwise_scale_inv"):
        capd.open(store.path).find(tensor_name="x.rowwise_data")[0].torch(0, dequantise=True)


def test_of_a_tensor_whose_largest_part_was_dropped_nothing_is_made_up(save: Save) -> None:
    store = save(("x", mxfp8(64)), ("x", mxfp8(1200)), arena_bytes=1 << 20)

    scales = {one.records[0].iteration: one for one in store.find(tensor_name="x.scale")}
    assert scales[0].torch(0, dequantise=True).shape == (64, 1024)
    with pytest.raises(CapdError, match="no record of its part 'qdata' has the same moment"):
        scales[1].torch(0, dequantise=True)


def test_show_says_what_the_parts_make(save: Save) -> None:
    run = save(("weight", mxfp8(8)), strict=True).path

    def show(*more: str) -> str:
        command = [sys.executable, "-m", "capd", "show", str(run), "*weight.qdata*#0", *more]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    assert "a part of weight, of class MXTensor that dequantises to bfloat16 [8, 1024]" in show()
    assert json.loads(show("--json"))["dequantises_to"] == {
        "tensor_name": "weight", "class": "MXTensor", "dtype": "bfloat16", "shape": [8, 1024],
    }  # fmt: skip
