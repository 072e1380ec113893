"""The msprobe dump of a captured run, without the tool: its layout, its numbers, its tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capd.store.read.store import open_store
from capd_client.protocol.key import Moment
from tests.kit.store.cli import StoreWriter, linear_key, run_capd

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


@pytest.mark.parametrize(
    "metadata",
    [
        {"node": "Module.fc.Linear.forward.0", "path": ["input_kwargs", "../../../../../escaped"]},
        {"node": "Module.fc.Linear.forward.0", "path": ["input_args", 0], "file": "../escaped.pt"},
        {"node": "../../escaped", "path": ["input_args", 0]},
        {"node": "Module.fc.Linear.forward.0", "path": ["input_kwargs", "x" * 300]},
    ],
)
def test_metadata_of_a_record_never_lead_out_of_the_directory(
    tmp_path: Path, metadata: dict[str, Any]
) -> None:
    writer = StoreWriter(tmp_path / "captures")
    text = json.dumps({"msprobe": metadata}).encode()
    writer.put("exp", linear_key(), np.ones(2, np.float32), "float32", Moment(), metadata=text)
    run = writer.close() / "exp.zarr"

    done = run_capd("export", run, "--to", "msprobe", "-o", tmp_path / "a" / "b" / "out", "--json")

    assert (done.code, done.json["records"], done.json["left_out"]) == (0, 1, []), done.err
    assert not [path for path in tmp_path.rglob("*escaped*") if "out" not in path.parts]
    [saved] = (tmp_path / "a" / "b" / "out" / "step0" / "rank0" / "dump_tensor_data").iterdir()
    assert torch.load(saved, weights_only=True).tolist() == [1, 1]


def test_records_of_one_place_or_one_file_are_written_once_or_named(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "captures")
    node = "Module.fc.Linear.forward.0"
    for number, path in enumerate(
        [["input_args", 0], ["input_args", 1], ["input_args", "a"], ["input_args", 0, "b"]]
    ):
        text = json.dumps({"msprobe": {"node": node, "path": path, "file": "x.pt"}}).encode()
        moment = Moment(call=number, time_ns=1 + number)
        writer.put("exp", linear_key(), np.full(2, number, np.float32), "float32", moment, metadata=text)
    run = writer.close() / "exp.zarr"

    done = run_capd("export", run, "--to", "msprobe", "-o", tmp_path / "out", "--json")

    left_out = [{"reason": "another record has their place in dump.json", "records": 2}]
    assert (done.code, done.json["records"], done.json["left_out"]) == (0, 2, left_out), done.err
    entry = _read(tmp_path / "out")["data"][node]
    data = tmp_path / "out" / "step0" / "rank0" / "dump_tensor_data"
    for number, told in enumerate(entry["input_args"]):
        assert torch.load(data / told["data_name"], weights_only=True).tolist() == [number, number]


def test_the_longest_names_are_exported(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "captures")
    for operation in ("forward", "backward"):
        key = linear_key(module="m" * 4096, tensor_name="t" * 4096, operation=operation)
        attributes = {"class": "C" * 200}
        writer.put("exp", key, np.ones(2, np.float32), "float32", Moment(), attributes=attributes)
    run = writer.close() / "exp.zarr"

    done = run_capd("export", run, "--to", "msprobe", "-o", tmp_path / "out", "--json")

    assert (done.code, done.json["records"]) == (0, 2), done.err


def test_a_file_that_may_not_grow_is_said_as_for_other_formats(captured: Dumped, tmp_path: Path) -> None:
    capd = [sys.executable, "-m", "capd", "export", captured(), "--to", "msprobe", "-o", tmp_path / "out"]
    limited = """
import os, resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
os.execv(sys.argv[1], sys.argv[1:])
"""

    done = subprocess.run(
        [sys.executable, "-c", limited, *map(str, capd)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode == 6, done.stderr
    assert "may not grow any more" in done.stderr
    assert not list((tmp_path / "out").rglob("*.json"))
    assert not list((tmp_path / "out").rglob(".capd-export*"))
