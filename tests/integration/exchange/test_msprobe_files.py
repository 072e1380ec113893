"""The msprobe dump of a captured run, without the tool: its layout, its numbers, its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from capd.store.read.store import open_store
from tests.kit.store.cli import run_capd

Dumped = Callable[..., Path]
LINEARS = [f"layers.{layer}.fc{number}" for layer in (0, 1) for number in (1, 2)]


def _read(dump: Path, name: str = "dump.json") -> Any:
    return json.loads((dump / "step0" / "rank0" / name).read_text())


def test_every_captured_tensor_is_a_bare_tensor_with_its_numbers(captured: Dumped, exported: Dumped) -> None:
    dump = exported()
    data = dump / "step0" / "rank0" / "dump_tensor_data"
    origins = _read(dump, "capd_msprobe.json")["files"]
    series = {one.path: one for one in open_store(captured()).series}

    assert len(origins) == sum(map(len, series.values())) == len(list(data.iterdir()))
    for name, origin in origins.items():
        saved = torch.load(data / name, weights_only=True)
        expected = series[origin["series"]].record(origin["record"]).torch()
        assert saved.dtype == expected.dtype == torch.bfloat16
        assert torch.equal(saved, expected)
    entry = _read(dump)["data"]["Module.layers.0.fc1.Linear.forward.0"]
    weight = entry["parameters"]["weight"]
    values = torch.load(data / weight["data_name"], weights_only=True).double()
    assert weight["Max"] == values.max().item()
    assert weight["Min"] == values.min().item()
    assert abs(weight["Norm"] - values.norm().item()) < 1e-12
    assert abs(weight["Mean"] - values.mean().item()) < 1e-15
    assert weight["requires_grad"] is True
    assert weight["shape"] == [16, 8]


def test_nodes_have_the_class_the_call_and_their_parents(exported: Dumped) -> None:
    dump = _read(exported())
    parents = _read(exported(), "construct.json")
    expected = {
        f"Module.{name}.Linear.{way}.{call}"
        for name in LINEARS
        for way in ("forward", "backward")
        for call in (0, 1)
    }

    assert (dump["task"], dump["level"], dump["framework"]) == ("tensor", "L0", "pytorch")
    assert set(dump["data"]) == expected
    assert parents["Module.layers.1.fc2.Linear.backward.1"] == "Module.layers.1.Module.backward.1"
    assert parents["Module.layers.1.Module.backward.1"] is None
    assert len(parents) == len(expected) + 2 * 2 * 2
    moments = _read(exported(), "capd_msprobe.json")["nodes"]
    assert moments.keys() == expected


def test_weights_are_written_once_or_for_every_call(
    captured: Dumped, exported: Dumped, tmp_path: Path
) -> None:
    done = run_capd("export", captured(), "--to", "msprobe", "--repeat-weights", "-o", tmp_path / "all")
    assert done.code == 0, done.err

    once, every = _read(exported())["data"], _read(tmp_path / "all")["data"]
    for name in LINEARS:
        assert "weight" in once[f"Module.{name}.Linear.forward.0"]["parameters"]
        assert once[f"Module.{name}.Linear.forward.1"]["parameters"] == {}
        first, second = (
            every[f"Module.{name}.Linear.forward.{call}"]["parameters"]["weight"] for call in (0, 1)
        )
        assert first["data_name"] != second["data_name"]
        assert first["Norm"] == second["Norm"]


def test_a_second_export_replaces_nothing(captured: Dumped, exported: Dumped) -> None:
    before = {path: path.read_bytes() for path in exported().rglob("*.*") if path.is_file()}

    done = run_capd("export", captured(), "--to", "msprobe", "-o", exported())

    assert done.code == 1
    assert "exists already" in done.err
    assert {path: path.read_bytes() for path in exported().rglob("*.*") if path.is_file()} == before
