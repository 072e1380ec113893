"""`capd report` on directories of tensor_saver's tensor files, read in place, and on more than fits into memory."""

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

from capd_client.protocol.key import Moment
from tests.kit.store.cli import Result, StoreWriter, linear_key
from tests.kit.store.pt_files import SEED_NAME, seed_dictionary

Capd = Callable[..., Result]
UNNAMED = dict.fromkeys(("layer_idx", "phase", "component", "rank", "sample_idx", "iteration", "quant_type"))


@pytest.fixture(autouse=True)
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capd.report.figures.pages.all_pages", lambda groups: iter(()))


def document_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "global_statistics.json").read_text())
    return found


@pytest.mark.parametrize("names", ["A", "B", "C"])
def test_files_in_every_scheme_say_what_the_run_says_that_they_were_exported_from(
    capd: Capd, second: Path, tmp_path: Path, names: str
) -> None:
    assert capd("export", second, "--out", tmp_path / "files", "--names", names).code == 0

    of_run = capd("report", second, "-o", tmp_path / "of_run", "--json")
    of_files = capd("report", tmp_path / "files", "-o", tmp_path / "of_files", "--json")

    assert (of_run.code, of_files.code) == (0, 0), of_files.err
    assert of_files.json["records"] == of_run.json["records"] == 6
    left, right = document_of(tmp_path / "of_run"), document_of(tmp_path / "of_files")
    assert left["by"] == right["by"]
    assert left["all"] == right["all"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("20250908_091143_0001_attention_L2_forward_hifp8_query.pt", {}),
        (
            "20250908_095220_0001_attention_L2_forward_pre_FA_hifp8_query.pt",
            {"phase": "pre", "component": "FA"},
        ),
        (
            "20250908_095220_0001_iter005_attention_L2_forward_pre_FA_hifp8_rank3_sample4_query.pt",
            {"phase": "pre", "component": "FA", "rank": 3, "sample_idx": 4, "iteration": 5},
        ),
    ],
)
def test_what_the_metadata_lack_is_taken_from_the_name(
    capd: Capd, tmp_path: Path, name: str, known: dict[str, Any]
) -> None:
    files = tmp_path / "logs" / "hifp8"
    files.mkdir(parents=True)
    values = torch.tensor([1.0, -3.0, float("nan"), float("inf"), 0.0])
    metadata = {**UNNAMED, "layer_type": "attention", "tensor_name": "query"}
    torch.save(seed_dictionary(values, **metadata), files / name)

    done = capd("report", tmp_path / "logs", "-o", tmp_path / "out", "--layer-base", "1", "--json")

    assert (done.code, done.json["quant_types"]) == (0, ["hifp8"]), done.err
    by = document_of(tmp_path / "out")["by"]
    assert [group["layer"] for group in by["layer"]] == [1]
    for field, value in known.items():
        assert [group[field] for group in by[field]] == [value], field
    [query] = by["tensor_name"]
    assert (query["count"], query["nan"], query["inf"], query["zero"]) == (5, 1, 1, 1)
    assert (query["min"], query["max"]) == (-3.0, 1.0)


def test_bad_files_are_named_skipped_and_counted_and_the_rest_delivered(capd: Capd, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    torch.save(seed_dictionary(torch.arange(6.0)), logs / SEED_NAME)
    (logs / "broken.pt").write_bytes((logs / SEED_NAME).read_bytes()[:-100])
    (logs / "left.pkl").write_bytes(b"\x80\x04K\x01.")
    (logs / "link\x1b[31m.pt").symlink_to(logs / SEED_NAME)

    done = capd("report", logs, "-o", tmp_path / "out", "--json")

    assert (done.code, done.json["records"]) == (1, 1)
    reasons = {Path(one["name"]).name: one["reason"] for one in done.json["skipped"]}
    assert set(reasons) == {"broken.pt", "left.pkl", "link\N{REPLACEMENT CHARACTER}[31m.pt"}
    assert "plain pickle" in reasons["left.pkl"]
    assert "not followed" in reasons["link\N{REPLACEMENT CHARACTER}[31m.pt"]
    assert all(f"skipped {one['name']}: " in done.err for one in done.json["skipped"])


def test_a_selection_of_files_is_made_by_what_they_say(capd: Capd, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for number, layer in enumerate((0, 1, 2)):
        tensor = torch.full((3,), float(layer))
        torch.save(
            seed_dictionary(tensor, layer_idx=layer), logs / SEED_NAME.replace("0001", f"{number:04d}")
        )

    some = capd("report", logs, "-o", tmp_path / "some", "--layer", "1-2", "--quick")
    none = capd("report", logs, "-o", tmp_path / "none", "--layer", "7")

    assert (some.code, none.code) == (0, 5)
    whole = document_of(tmp_path / "some")["all"]
    assert (whole["records"], whole["mean"], whole["quantiles"]) == (2, 1.5, None)
    assert "matches the selection" in none.err
    assert capd("report", tmp_path / "nowhere", "-o", tmp_path / "out").code == 1


@pytest.mark.fault
@pytest.mark.timeout(900)
def test_memory_is_bounded_whatever_the_size_of_the_run(tmp_path: Path) -> None:
    """600 MiB of records; reading them takes less than a third of that on top of what a small run takes."""
    writer = StoreWriter(tmp_path)
    block = np.random.default_rng(1).integers(0, 1 << 14, (5 << 20,), dtype=np.uint16)
    for number in range(60):
        writer.put("large", linear_key(layer=number % 3), block, "bfloat16", Moment(iteration=number))
    writer.put("small", linear_key(), block[:4], "bfloat16", Moment())
    writer.close()

    peaks = {}
    for name in ("small", "large"):
        code = (
            "import resource, sys\nfrom capd.report.figures import pages\npages.all_pages = lambda groups: iter(())\n"
            "from capd.cli.app import main\n"
            "try:\n    main(sys.argv[1:])\nfinally:\n"
            "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
        )
        run, out = tmp_path / f"{name}.zarr", tmp_path / name
        done = subprocess.run(
            [sys.executable, "-c", code, "report", str(run), "-o", str(out), "--workers", "4"],
            capture_output=True, text=True, timeout=800, check=True,
        )  # fmt: skip
        peaks[name] = int(done.stderr.split()[-1]) << 10

    assert document_of(tmp_path / "large")["all"]["count"] == 60 * block.size
    assert peaks["large"] - peaks["small"] < 200 << 20, peaks
