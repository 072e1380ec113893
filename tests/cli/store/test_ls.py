"""`capd ls`: documented JSON, filters, counts, and which run is meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.kit.store.cli import Result
from tests.kit.store.writing import Writer, key

Capd = Callable[..., Result]
FIELDS = {
    "path", "quant_type", "rank", "layer", "phase", "layer_type", "operation", "component", "tensor_name",
    "module", "stack", "dtype", "shape", "records", "raw_bytes", "stored_bytes", "kept",
}  # fmt: skip


def test_json_lists_every_series_with_exactly_the_documented_fields(capd: Capd, second: Path) -> None:
    found = capd("ls", second, "--json")

    assert found.code == 0
    assert len(found.json) == 5
    assert all(set(item) == FIELDS for item in found.json)
    item = next(item for item in found.json if item["tensor_name"] == "input")
    assert item == {
        "path": "bf16/rank0/layer0/pre/blocks.0.mlp.fc1.forward.input", "quant_type": "bf16", "rank": 0, "layer": 0,
        "phase": "pre", "layer_type": "linear", "operation": "forward", "component": "linear",
        "tensor_name": "input", "module": "blocks.0.mlp.fc1", "stack": "blocks", "dtype": "bfloat16",
        "shape": [2, 2, 4], "records": 2, "raw_bytes": 32, "stored_bytes": item["stored_bytes"],
        "kept": "tensor",
    }  # fmt: skip


def test_series_of_statistics_are_listed_with_dtype_and_shape_of_the_tensors(
    capd: Capd, both_kinds: Path
) -> None:
    found = {item["kept"]: item for item in capd("ls", both_kinds, "--json").json}

    assert found.keys() == {"tensor", "statistics"}
    assert {(item["dtype"], tuple(item["shape"])) for item in found.values()} == {("bfloat16", (1, 2, 4))}
    assert (found["tensor"]["raw_bytes"], found["statistics"]["raw_bytes"]) == (16, 2136)
    assert [group["kept"] for group in capd("ls", both_kinds, "--by", "kept", "--json").json] == [
        "statistics",
        "tensor",
    ]
    assert "statistics" in capd("ls", both_kinds).out


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        (["--quant-type", "bf16"], 2),
        (["--quant-type", "bf16", "--quant-type", "fp32"], 5),
        (["--rank", "1"], 2),
        (["--rank", "0-1"], 5),
        (["--layer", "0"], 3),
        (["--layer", "1-2"], 1),
        (["--layer", "none"], 1),
        (["--layer", "2,none"], 2),
        (["--phase", "post"], 3),
        (["--layer-type", "linear"], 5),
        (["--component", "linear"], 5),
        (["--operation", "backward"], 1),
        (["--tensor", "output", "--rank", "0"], 1),
        (["--module", "*.attn.*"], 2),
        (["--module", "lm_head"], 1),
    ],
)
def test_filters_select_by_field(capd: Capd, second: Path, filters: list[str], count: int) -> None:
    found = capd("ls", second, "--json", *filters)

    assert (found.code, len(found.json)) == (0, count)


def test_a_filter_that_matches_nothing_exits_with_5(capd: Capd, second: Path) -> None:
    found = capd("ls", second, "--rank", "9", "--json")

    assert (found.code, found.json) == (5, [])
    assert "matches the selection" in found.err


def test_counts_by_field_add_up(capd: Capd, second: Path) -> None:
    found = capd("ls", second, "--by", "layer", "--json").json

    assert [(group["layer"], group["series"], group["records"]) for group in found] == [
        (0, 3, 4),
        (2, 1, 1),
        (None, 1, 1),
    ]
    assert all(set(group) == {"layer", "series", "records", "raw_bytes", "stored_bytes"} for group in found)


def test_an_unknown_field_to_count_by_is_a_usage_error(capd: Capd, second: Path) -> None:
    found = capd("ls", second, "--by", "colour")

    assert found.code == 2
    assert "tensor_name" in found.err


def test_the_table_has_data_on_stdout_and_the_summary_on_stderr(capd: Capd, second: Path) -> None:
    found = capd("ls", second, "--limit", "2")

    assert len(found.out.splitlines()) == 3
    assert "5 series, 6 records" in found.err
    assert "showing 2 of 5" in found.err


def test_a_directory_of_runs_means_its_newest_and_says_so(capd: Capd, store_root: Path) -> None:
    found = capd("ls", store_root, "--json")

    assert len(found.json) == 5
    assert "second.zarr" in found.err
    assert len(capd("ls", store_root, "--run", "first", "--json").json) == 1


def test_the_default_store_is_capd_store(capd: Capd, store_root: Path, tmp_path: Path) -> None:
    assert len(capd("ls", "--json", CAPD_STORE=str(store_root)).json) == 5
    empty = capd("ls", cwd=tmp_path)
    assert empty.code == 1
    assert "captures" in empty.err


def test_a_run_that_is_not_there_is_named_with_those_that_are(capd: Capd, store_root: Path) -> None:
    found = capd("ls", store_root, "--run", "third")

    assert found.code == 1
    assert "second" in found.err


def test_the_gradient_that_tensor_saver_called_input_is_listed_by_capds_name(
    capd: Capd, tmp_path: Path
) -> None:
    writer = Writer(tmp_path)
    for operation in ("forward", "backward"):
        writer.put(key("input", operation=operation), "float32", np.zeros(3, np.float32))
    writer.close()

    found = capd("ls", writer.run, "--json", "--tensor", "grad_output")

    assert [(item["tensor_name"], item["operation"]) for item in found.json] == [("input", "backward")]
