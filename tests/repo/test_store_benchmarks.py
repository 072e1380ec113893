"""The store's benchmarks run from end to end at tiny sizes, compare like with like, and report every row."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.fault

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TIMEOUT_S = 100
# What is compared does not differ by engine: the same codec on the same chunks, with an index of a few bytes.
SAME_CODEC = 0.02


def run(script: str, *args: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, "--quick", *args],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    run("kit/corpus.py", "--dir", directory)
    return directory


def results(script: str, directory: Path, *args: str | Path) -> dict[str, Any]:
    """The JSON of one run; it leaves no file of its own behind."""
    report = directory / "report.json"
    scratch = directory / "scratch"
    scratch.mkdir()
    run(script, "--rounds", "1", "--directory", scratch, "--json", report, *args)
    assert list(scratch.iterdir()) == []
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["machine"]["cpus"] >= 1
    assert found["checks"]
    assert all(isinstance(check["met"], bool) for check in found["checks"])
    return found


def test_the_corpus_holds_distinct_tensors_of_every_format_and_role(corpus: Path) -> None:
    tensors = json.loads((corpus / "manifest.json").read_text())["tensors"]

    held = {(row["dtype"], row["role"]) for row in tensors}
    roles = {"activation", "gradient", "weight", "weight_gradient"}
    for dtype in ("bfloat16", "float32", "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2"):
        assert {role for name, role in held if name == dtype} >= roles
    assert {("bfloat16", "repeated"), ("float8_e5m2", "gradient")} <= held
    assert len({(row["dtype"], row["sha256"]) for row in tensors}) == len(tensors)
    for row in tensors:
        bits = np.load(corpus / row["file"])
        assert list(bits.shape) == row["shape"]
        assert hashlib.sha256(bits.tobytes()).hexdigest() == row["sha256"]


def test_writing_measures_all_engines_on_the_same_codec(corpus: Path, tmp_path: Path) -> None:
    found = results("store_write.py", tmp_path, "--corpus", corpus)

    stream = {row["engine"]: row for row in found["stream"]}
    assert stream.keys() >= {"bare codec", "capd", "capd + statistics", "zarr-python", "tensorstore"}
    for engine, row in stream.items():
        assert row["raw"] == stream["capd"]["raw"]
        assert row["stored"] == pytest.approx(stream["bare codec"]["stored"], rel=SAME_CODEC), engine
        assert row["cpu_s"] > 0
        assert engine.startswith("bare codec") or row["written_nbytes"] >= row["stored"]
    append = {row["engine"]: row for row in found["append"]}
    assert append.keys() >= {"capd", "capd, each sealed", "zarr-python", "tensorstore"}
    assert append["zarr-python"]["written_nbytes"] > append["capd"]["written_nbytes"] > 0


def test_reading_measures_all_engines_on_the_same_bytes(tmp_path: Path) -> None:
    found = results("store/store_read.py", tmp_path)

    rows = {row["engine"]: row for row in found["rows"]}
    assert rows.keys() >= {"capd", "zarr-python", "tensorstore"}
    for operation in ("cold", "whole", "in order", "random", "slice", "small"):
        returned = {row[f"{operation} nbytes"] for row in rows.values()}
        assert len(returned) == 1
        assert returned.pop() > 0
        assert all(row[f"{operation} cpu_s"] > 0 for row in rows.values())


def test_small_records_are_measured_beside_the_other_engines(tmp_path: Path) -> None:
    found = results("store_small.py", tmp_path)

    durable = [row["durability"] for row in found["capd"]]
    assert durable == ["buffered", "durable"]
    for row in found["capd"]:
        assert row["append_us"] > 0
        assert row["written"] >= row["stored"] > 0
        assert 0 < row["capd-append us"] <= row["append_us"] * 1.5
    assert {row["name"].partition(", ")[2] for row in found["others"]} == {
        "raw_log", "np_save", "zarr-python", "tensorstore",
    }  # fmt: skip


def test_sealing_is_measured_for_small_and_large_records(tmp_path: Path) -> None:
    found = results("store/store_seal.py", tmp_path)

    assert {row["kib"] for row in found["rows"]} == {4, 300}
    assert all(row["stored"] > 0 and row["seal_s"] > 0 for row in found["rows"])


def test_codecs_are_measured_on_every_format_and_role(corpus: Path, tmp_path: Path) -> None:
    found = results("store/store_codecs.py", tmp_path, "--corpus", corpus)

    tensors = json.loads((corpus / "manifest.json").read_text())["tensors"]
    codecs = {"default", "fast", "none", "auto", "auto block", "zstd 1"}
    rows = {(row["dtype"], row["role"], row["codec"]): row for row in found["rows"]}
    assert rows.keys() == {(t["dtype"], t["role"], codec) for t in tensors for codec in codecs}
    for (_, _, codec), row in rows.items():
        assert row["encode_mb_per_s"] > 0
        assert row["decode_mb_per_s"] > 0
        assert codec != "none" or 0.95 < row["ratio"] < 1  # the checksums, on tiny tensors


def test_tensor_files_are_measured_against_bare_torch(tmp_path: Path) -> None:
    found = results("pt_files.py", tmp_path)

    variants = {row["variant"]: row for row in found["rows"] if row["tensors"] == "1 MiB"}
    assert variants.keys() == {
        "torch.save", "export", "torch.load", "load and save", "import", "import, codec fast",
    }  # fmt: skip
    assert len({row["raw_nbytes"] for row in variants.values()}) == 1
    assert any(check["at_most"] for check in found["checks"])  # the peak of memory


def test_every_way_to_compare_is_measured_and_its_memory_is_judged(tmp_path: Path) -> None:
    found = results("compare.py", tmp_path)

    rows = {row["variant"]: row for row in found["rows"]}
    assert {"", "hifp8", "mxfp8", "mxfp8:axis=-2", "nvfp4", "sweep", "two runs"} <= rows.keys()
    raw = {name: row["raw_nbytes"] for name, row in rows.items() if name != "two runs"}
    assert set(raw.values()) == {rows["two runs"]["raw_nbytes"] // 2}
    assert [check["at_most"] for check in found["checks"]] == [True] * 4


def test_a_report_is_measured_by_size_of_the_records_and_its_rate_is_judged(tmp_path: Path) -> None:
    found = results("report.py", tmp_path)

    sizes = {row["variant"].partition(",")[0]: row["raw_nbytes"] for row in found["rows"]}
    assert (len(found["rows"]), sizes.keys()) == (9, {"8 MiB", "1 MiB", "128 KiB"})
    assert sizes["8 MiB"] == 8 * sizes["1 MiB"] == 64 * sizes["128 KiB"]
    [check] = found["checks"]
    assert (check["bound"], check["at_most"]) == (60.0, False)


def test_the_benchmark_of_listing_runs() -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "store" / "listing.py", "--records", "200", "--series", "20", "--json"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["seconds"].keys() >= {"capd ls", "capd stats"}
