"""`capd show --logical` and `capd export --logical`: whole tensors, or an error that names what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from capd_client.protocol.key import Moment
from tests.kit.store.cli import Result, StoreWriter
from tests.kit.store.parts import linear, placed, put_parts

Capd = Callable[..., Result]
WHOLE = np.arange(24.0, dtype=np.float32).reshape(4, 6)
NAME = "layers.0.fc1.forward.weight"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two ranks: a weight in halves, and an output of which each has a term, at two moments."""
    writer = StoreWriter(tmp_path)
    for iteration in range(2):
        for rank in range(2):
            half = WHOLE[2 * rank : 2 * rank + 2] + iteration
            parts = [("weight", half, "S(0)"), ("output", WHOLE * (rank + 1), "P(sum)")]
            for name, array, placement in parts:
                attributes = placed("tp", placement, rank, 2)
                writer.put(
                    "run", linear(name, rank=rank), array, "float32", Moment(iteration), attributes=attributes
                )
    return writer.close() / "run.zarr"


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """The weight of which the second rank captured nothing, but another tensor."""
    other = (linear("input", rank=1), WHOLE, placed("tp", "R", 1, 2))
    own = (linear("weight"), WHOLE[:2], placed("tp", "S(0)", 0, 2))
    return put_parts(tmp_path / "half", [own, other])


@pytest.mark.parametrize(
    "name", [NAME, "forward.weight", "*.weight", "fp32/rank1/layer0/pre/layers.0.fc1.forward.weight"]
)
def test_a_whole_tensor_is_shown_with_its_parts(capd: Capd, run: Path, name: str) -> None:
    found = capd("show", run, name, "--logical", "--json").json

    assert (found["name"], found["dtype"], found["placements"]) == (NAME, "float32", "tp S(0) of 2")
    assert [(one["rank"], one["place"]) for one in found["parts"]] == [(0, {"tp": 0}), (1, {"tp": 1})]
    assert [(one["index"], one["iteration"], one["shape"]) for one in found["records"]] == [
        (0, 0, [4, 6]), (1, 1, [4, 6]),
    ]  # fmt: skip
    text = capd("show", run, name, "--logical")
    assert text.code == 0
    for piece in (
        f"tensor      {NAME}",
        "placements  tp S(0) of 2",
        "parts       of ranks 0, 1",
        "#1  iteration 1  4×6",
    ):
        assert piece in text.out


def test_a_record_shows_values_statistics_and_the_spread(capd: Capd, run: Path) -> None:
    found = capd("show", run, f"{NAME}#-1", "--logical", "--json", "--values", "3").json
    assert (found["index"], found["shape"], found["values"], found["spread"]) == (
        1,
        [4, 6],
        [1.0, 2.0, 3.0],
        0.0,
    )
    assert (found["stats"]["count"], found["stats"]["max"]) == (24, 24.0)
    assert sum(found["value_histogram"]["counts"]) == 24

    added = capd("show", run, "forward.output#0", "--logical")
    assert "float32, added in float64 from float32" in added.out.replace("\n            ", " ")
    assert "values      0, 3, 6, 9" in added.out


def test_what_is_not_there_is_said(capd: Capd, run: Path) -> None:
    several = capd("show", run, "layers.0.fc1.forward.*", "--logical")
    assert several.code == 2
    assert f"2 whole tensors (layers.0.fc1.forward.output, {NAME}" in several.err
    assert capd("show", run, "bias", "--logical").code == 5
    assert capd("show", run, f"{NAME}#2", "--logical").code == 5


def test_a_missing_part_is_listed_and_its_record_refused(capd: Capd, half: Path) -> None:
    found = capd("show", half, NAME, "--logical", "--json").json
    assert [one["shape"] for one in found["records"]] == [None]
    assert found["records"][0]["missing"] == [{"place": {"tp": 1}, "ranks": ["rank 1 on node node0"]}]
    assert "missing: tp 1 (rank 1 on node node0)" in capd("show", half, NAME, "--logical").out
    refused = capd("show", half, f"{NAME}#0", "--logical")
    assert refused.code == 2
    assert "1 of 2 parts are missing: tp 1 (rank 1 on node node0)" in refused.err.replace("\n", " ")


def test_pt_files_hold_whole_tensors(capd: Capd, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    planned = capd("export", run, "--logical", "--json")
    assert planned.json == {"directory": None, "format": "pt", "records": 4, "tensors": 2}
    assert not out.exists()
    done = capd("export", run, "--logical", "--tensor", "weight", "-o", out, "--json")
    assert (done.json["files"], done.json["records"], done.json["raw_bytes"]) == (2, 2, 2 * WHOLE.nbytes)

    files = sorted((out / "fp32").iterdir())
    for iteration, file in enumerate(files):
        found = torch.load(file, weights_only=True)
        assert torch.equal(found["tensor"], torch.from_numpy(WHOLE + iteration))
        assert (found["metadata"]["iteration"], found["tensor_info"]["max"]) == (iteration, 23.0 + iteration)
        logical = found["metadata"]["logical"]
        assert (logical["name"], logical["run"], logical["placements"]) == (NAME, "run", "tp S(0) of 2")
        assert [part["rank"] for part in logical["parts"]] == [0, 1]
    again = capd("import", out, "--store", tmp_path / "again")
    assert again.code == 0, again.err


def test_npz_files_hold_all_moments(capd: Capd, run: Path, tmp_path: Path) -> None:
    done = capd("export", run, "--logical", "--to", "npz", "-o", tmp_path / "out")
    assert done.code == 0, done.err
    with np.load(tmp_path / "out" / "fp32" / "layers.0.fc1.forward.output.npz", allow_pickle=False) as found:
        document = json.loads(str(found["capd"]))
        for record in document["records"]:
            np.testing.assert_array_equal(found[str(record["record"])], 3 * WHOLE)
    assert [record["iteration"] for record in document["records"]] == [0, 1]
    assert document["logical"]["attributes"]["sum"] == "float32, added in float64 from float32"


def test_nothing_is_exported_if_a_part_is_missing(capd: Capd, half: Path, tmp_path: Path) -> None:
    refused = capd("export", half, "--logical", "-o", tmp_path / "out")
    assert refused.code == 2
    assert "tp 1 (rank 1 on node node0)" in refused.err.replace("\n", " ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["safetensors", "parquet", "csv"])
def test_other_formats_have_no_whole_tensors(capd: Capd, run: Path, tmp_path: Path, to: str) -> None:
    refused = capd("export", run, "--logical", "--to", to, "-o", tmp_path / "out")
    assert refused.code == 2
    assert f"--logical writes pt or npz, not {to}" in refused.err
    assert not (tmp_path / "out").exists()
