"""Dumps of msprobe that are hostile, damaged or huge: nothing leaves the directory, and what is skipped is named."""

from __future__ import annotations

import io
import json
import math
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from capd.cli.store.export import Format
from capd.exchange.msprobe.dumps import find_dumps
from capd.exchange.msprobe.import_ import dumped_tensors, load_dumped
from capd.exchange.msprobe.json_stream import entries_of
from capd.exchange.msprobe.names import Node, is_plain_name, parsed_node
from capd.exchange.peers import WRITERS
from capd.pt_files.pickle_scan import BadTensorFile
from capd.store.read.store import open_store
from tests.kit.store.cli import run_capd

NODE = "Module.layers.3.fc1.Linear.forward.2"
Make = Callable[..., Path]


@pytest.fixture
def dump(tmp_path: Path) -> Make:
    """`dump(data, place)` writes a dump.json with these entries, and a tensor `x.pt` beside it; returns its root."""

    def make(data: dict[str, Any] | str, place: str = "step7/rank1") -> Path:
        directory = tmp_path / "dump" / place
        (directory / "dump_tensor_data").mkdir(parents=True)
        torch.save(torch.arange(6.0).reshape(2, 3), directory / "dump_tensor_data" / "x.pt")
        text = data if isinstance(data, str) else json.dumps(data)
        head = '{"task": "tensor", "level": "L0", "framework": "pytorch", "dump_data_dir": null, "data": '
        (directory / "dump.json").write_text(f"{head}{text}}}")
        return tmp_path / "dump"

    return make


def tensor(name: object = "x.pt", **more: Any) -> dict[str, Any]:
    told = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 3], "requires_grad": True, **more}
    return told if name is None else {**told, "data_name": name}


def forward(name: object = "x.pt", **more: Any) -> dict[str, Any]:
    return {"input_args": [tensor(name, **more)], "input_kwargs": {}, "output": []}


def refusals(root: Path) -> list[str]:
    """Load everything, and return why tensors were refused."""
    said = []
    for source in dumped_tensors(find_dumps(root)):
        try:
            load_dumped(source)
        except BadTensorFile as error:
            said.append(str(error))
    return said


def test_a_tensor_becomes_a_record_of_its_call(dump: Make) -> None:
    dumps = find_dumps(dump({NODE: forward(md5="0a1b2c3d")}))

    [record] = map(load_dumped, dumped_tensors(dumps))
    key, moment, metadata = (
        record.capture.key,
        record.capture.moment,
        json.loads(record.capture.metadata)["msprobe"],
    )
    assert (key.module, key.tensor_name, key.rank, key.layer) == ("layers.3.fc1", "input", 1, 3)
    assert (key.operation, key.phase, key.layer_type, key.quant_type) == ("forward", "pre", "linear", "fp32")
    assert (moment.iteration, moment.call, moment.micro_batch) == (7, 2, 0)
    assert record.capture.attributes == {"class": "Linear"}
    assert record.capture.requires_grad
    assert metadata == {
        "node": NODE, "path": ["input_args", 0], "recompute": "unknown", "file": "x.pt", "md5": "0a1b2c3d",
    }  # fmt: skip
    assert record.bits.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.mark.parametrize(
    ("node", "entry", "names"),
    [
        (
            "Functional.linear.5.forward",
            {"input_args": [tensor(), tensor(), tensor()], "output": [tensor()]},
            ["input", "weight", "bias", "output"],
        ),
        (
            "Functional.linear.5.backward",
            {"input": [tensor()], "output": [tensor(), tensor()]},
            ["grad_output", "grad_input", "grad_weight"],
        ),
        (
            "Functional.scaled_dot_product_attention.0.forward",
            {"input_args": [tensor(), tensor(), tensor()], "input_kwargs": {"attn_mask": tensor()}},
            ["query", "key", "value", "input.attn_mask"],
        ),
        ("Module.0.fc.Linear.parameters_grad.1", {"weight": [tensor()]}, ["grad_weight"]),
        (
            "Module.0.fc.Linear.backward.1",
            {"input": [tensor()], "output": [tensor()]},
            ["grad_output", "grad_input"],
        ),
        (
            "Module.fc.Linear.forward.0",
            {
                "input_args": [[tensor(), None], {"type": "float", "value": 1}],
                "parameters": {"bias": tensor()},
            },
            ["input.0.0", "bias"],
        ),
    ],
)
def test_names_of_tensors(dump: Make, node: str, entry: dict[str, Any], names: list[str]) -> None:
    dumps = find_dumps(dump({node: entry}))

    assert [load_dumped(one).capture.key.tensor_name for one in dumped_tensors(dumps)] == names


def test_an_entry_with_numbers_alone_is_kept_in_metadata(dump: Make) -> None:
    dumps = find_dumps(dump({NODE: forward(None, Max=2.5, Min=math.nan, Mean=math.inf, Norm=1.0)}))

    [record] = map(load_dumped, dumped_tensors(dumps))
    assert (record.capture.key.quant_type, record.bits.size) == ("msprobe_statistics", 0)
    told = json.loads(record.capture.metadata)["msprobe"]["statistics"]
    assert (told["Max"], told["Min"], told["Mean"]) == (2.5, "NaN", "Infinity")
    assert (told["shape"], told["dtype"]) == ([2, 3], "torch.float32")


@pytest.mark.parametrize(
    "name",
    ["../x.pt", "/etc/passwd", "a/x.pt", "..", "", ".x.pt", "x\0.pt", "a\\x.pt", 7, None, "x" * 300 + ".pt"],
)
def test_a_file_name_that_is_a_path_is_refused(dump: Make, name: object) -> None:
    entry = forward()
    entry["input_args"][0]["data_name"] = name

    [why] = refusals(dump({NODE: entry}))
    assert "no plain name" in why
    assert not is_plain_name(name)


def test_links_are_not_followed(dump: Make, tmp_path: Path) -> None:
    root = dump({NODE: forward("link.pt"), "Module.a.Linear.forward.0": forward()})
    data = root / "step7" / "rank1" / "dump_tensor_data"
    torch.save(torch.zeros(3), tmp_path / "outside.pt")
    (data / "link.pt").symlink_to(tmp_path / "outside.pt")

    [why] = refusals(root)
    assert "symbolic link" in why
    data.rename(tmp_path / "moved")
    data.symlink_to(tmp_path / "moved")
    assert ["symbolic link" in why for why in refusals(root)] == [True, True]
    (root / "step7").rename(tmp_path / "step7")
    (root / "step7").symlink_to(tmp_path / "step7")
    assert not find_dumps(root)


def test_other_bad_files_are_named(dump: Make) -> None:
    names = ["missing.pt", "pipe.pt", "text.pt", "dictionary.pt", "folder.pt", "x.npy"]
    root = dump({f"Module.m{number}.Linear.forward.0": forward(name) for number, name in enumerate(names)})
    data = root / "step7" / "rank1" / "dump_tensor_data"
    os.mkfifo(data / "pipe.pt")
    (data / "text.pt").write_text("no tensor")
    (data / "folder.pt").mkdir()
    torch.save({"a": torch.zeros(1)}, data / "dictionary.pt")

    said = refusals(root)
    parts = ["cannot be opened", "regular file", "no file of", "holds a dict", "regular file", "(.pt)"]
    for number, (why, part) in enumerate(zip(said, parts, strict=True)):
        assert part in why
        assert f"Module.m{number}.Linear" in why


@pytest.mark.parametrize(
    "place", ["step0/rank-1", "step-1/rank0", "step0/rank99999999999", "step0/proc" + "9" * 19]
)
def test_a_number_that_no_job_has_is_not_read_as_0(dump: Make, place: str) -> None:
    [why] = refusals(dump({NODE: forward()}, place))
    assert "is none that a job has" in why


@pytest.mark.parametrize("make_odd", [os.mkfifo, os.mkdir])
def test_a_dump_that_is_no_file_is_named(dump: Make, make_odd: Callable[[Path], None]) -> None:
    root = dump({NODE: forward()})
    (root / "step7" / "rank1" / "dump.json").unlink()
    make_odd(root / "step7" / "rank1" / "dump.json")

    [why] = refusals(root)
    assert "it is no regular file" in why


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ('{"a": ', "cut off"),
        ("[1]", "in the place of"),
        ('{"a": {"input_args": ' + "[" * 100_000 + "]" * 100_000 + "}}", ""),
        ('{"a": 5}', "no map"),
        ('{"' + NODE + '": {"input_args": ' + "[" * 40 + json.dumps(tensor()) + "]" * 40 + "}}", "nested"),
        ('{"odd": {"input_args": [' + json.dumps(tensor()) + "]}}", "no name"),
        (
            '{"Module.\\ud800.Linear.forward.0": {"input_args": [' + json.dumps(tensor()) + "]}}",
            "half of a character",
        ),
        ('{"a": {"input_args": [' + "9" * 5000 + "]}}", "thousands of digits"),
    ],
)
def test_bad_json_is_named(dump: Make, data: str, part: str) -> None:
    root = dump(data)
    if data.startswith("{"):
        [why] = refusals(root)
        assert part in why
    else:
        # It is known for a dump by what is beside it.
        assert ["in the place of" in why for why in refusals(root)] == [True]


def test_a_damaged_end_costs_only_what_follows(dump: Make) -> None:
    root = dump('{"' + NODE + '": ' + json.dumps(forward()) + ', "b": {"inp')

    assert len(list(dumped_tensors(find_dumps(root)))) == 2
    [why] = refusals(root)
    assert "the rest of it" in why


@pytest.mark.parametrize("piece", [1, 7, 1 << 18])
def test_entries_are_read_from_pieces_of_any_size(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capd.exchange.msprobe.json_stream._READ_NBYTES", piece)
    data = {"a": {"x": [1, -2.5, math.inf, None, "ü}{"]}, "b": {}, "c": {"deep": {"er": [[]]}}}
    text = json.dumps({"task": "x", "number": 12, "data": data, "end": True}, ensure_ascii=False, indent=1)

    assert dict(entries_of(io.BytesIO(text.encode()))) == data
    with pytest.raises(BadTensorFile, match="other text"):
        list(entries_of(io.BytesIO(text.encode() + b"x")))


class _Endless(io.RawIOBase):
    """A dump.json that never ends: a string without its end, or entries without number."""

    def __init__(self, piece: bytes) -> None:
        self._piece, self._first = piece, True

    def read(self, nbytes: int = -1) -> bytes:
        if self._first:
            self._first = False
            return b'{"data": {"a": "'
        return self._piece * (nbytes // len(self._piece) + 1)


def test_a_value_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capd.exchange.msprobe.json_stream.MAX_ENTRY_CHARS", 1 << 20)
    with pytest.raises(BadTensorFile, match="more than 1048576 characters"):
        list(entries_of(_Endless(b"x")))  # type: ignore[arg-type]


@pytest.mark.parametrize("entries", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_memory_does_not_follow_the_number_of_entries(dump: Make, entries: int) -> None:
    one = json.dumps(forward(None, Max=1.0))
    members = ",".join(f'"Module.m.Linear.forward.{number}": {one}' for number in range(entries))
    root = dump("{" + members + "}")
    del members
    tracemalloc.start()
    counted = sum(1 for _ in dumped_tensors(find_dumps(root)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert counted == entries
    assert peak < 8 << 20


def test_processes_without_a_rank_are_numbered(dump: Make) -> None:
    for place in ("step0/proc90", "step0/proc100", "step1/proc90"):
        root = dump({NODE: forward()}, place)

    captures = [load_dumped(source).capture for source in dumped_tensors(find_dumps(root))]
    assert [(one.moment.iteration, one.key.rank) for one in captures] == [(0, 0), (0, 1), (1, 0)]
    assert json.loads(captures[1].metadata)["msprobe"]["process"] == 100


def test_an_import_names_and_counts_what_it_skips(dump: Make, tmp_path: Path) -> None:
    root = dump({NODE: forward(), "Module.a.Linear.forward.0": forward("../x.pt")})

    done = run_capd("import", root, "--store", tmp_path / "store", "--json")
    again = run_capd("import", root, "--store", tmp_path / "store", "--from", "msprobe", "--json")

    assert (done.code, done.json["imported"], again.json["already"]) == (1, 1, 1)
    [skipped] = done.json["skipped"]
    assert "no plain name" in skipped["reason"]
    assert "Module.a.Linear.forward.0" in skipped["file"]
    [series] = open_store(tmp_path / "store" / "dump.zarr").series
    assert series.records[0].torch().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_names_of_nodes() -> None:
    assert parsed_node("Module.0.layers.1.fc.Linear.backward.12") == Node(
        "0.layers.1.fc", "Linear", "backward", 12
    )
    assert parsed_node("Torch.relu.3.forward") == Node("Torch.relu", "", "forward", 3)
    assert parsed_node("Module.forward.1") is None
    assert parsed_node("../Module.a.B.forward.1/x") is None


def test_the_command_offers_every_tool_that_is_written() -> None:
    assert WRITERS.keys() <= set(get_args(Format))
