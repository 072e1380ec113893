"""`capd report` on runs: its numbers against numpy on the same values, its pages as an image reader sees them."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from capd_client.protocol.key import Moment
from tests.kit.store.cli import (
    WITHOUT_MATPLOTLIB,
    Result,
    StoreWriter,
    bf16_bits,
    damaged,
    linear_key,
    shard_of,
)

pytestmark = pytest.mark.timeout(300)  # the first test waits for a report with all figures
Capd = Callable[..., Result]
JSON_NAME, TEXT_NAME = "global_statistics.json", "global_statistics_report.txt"
ODD, ODD_FILE = "hi$f_p8", "hi_f_p8~0074f67c52680d3b"  # a word that is no name of a file, and its name there
TYPES, RANKS, LAYERS, SAMPLES = (ODD, "mxfp8"), (0, 1), (0, 1, None), (0, 1)
TENSORS = {"weight": "float32", "grad_output": "bfloat16"}
SHARES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
Values = dict[tuple[Any, ...], np.ndarray]


def values_of(rng: np.random.Generator, one: str, layer: int | None, tensor: str) -> np.ndarray:
    values = rng.normal(scale=1 + (layer or 0), size=(8, 24)).astype(np.float32)
    if one == "mxfp8" and layer == 1 and tensor == "grad_output":
        values[0, :3] = np.nan, np.inf, -np.inf
    values[1, :5] = 0
    bits = bf16_bits(values)
    return (bits.astype(np.uint32) << 16).view(
        np.float32
    )  # what bfloat16 holds of them, for all tensors alike


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Values]:
    """A run, and the values of each of its records by (quant type, rank, layer, sample, tensor)."""
    root, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(11)
    writer, values = StoreWriter(root), {}
    for one, rank, layer, sample, tensor in product(TYPES, RANKS, LAYERS, SAMPLES, TENSORS):
        found = values_of(rng, one, layer, tensor)
        values[one, rank, layer, sample, tensor] = found
        key = linear_key(
            quant_type=one, rank=rank, layer=layer, tensor_name=tensor, module=f"blocks.{layer}.{tensor}",
            operation="backward" if "grad" in tensor else "forward",
        )  # fmt: skip
        bits = found if TENSORS[tensor] == "float32" else bf16_bits(found)
        writer.put("run", key, bits, TENSORS[tensor], Moment(iteration=sample, sample_idx=sample, time_ns=1))
    writer.close()
    return root / "run.zarr", values


@pytest.fixture(scope="module")
def reported(known: tuple[Path, Values], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reported") / "draw"
    command = [
        sys.executable,
        "-m",
        "capd",
        "report",
        str(known[0]),
        "-o",
        str(out),
        "--workers",
        "2",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert said["directory"] == str(out)
    assert (said["records"], said["quant_types"], said["skipped"]) == (len(known[1]), sorted(TYPES), [])
    assert sorted(said["files"]) == sorted(path.name for path in out.iterdir())
    return out


FIELDS = ("quant_type", "rank", "layer", "sample_idx", "tensor_name")


def test_every_group_of_the_json_is_what_numpy_finds(reported: Path, known: tuple[Path, Values]) -> None:
    document = json.loads((reported / JSON_NAME).read_text())

    assert (document["written_by"], document["format"], document["quick"]) == ("capd report", 1, False)
    assert_group(document["all"], list(known[1].values()), quantiles="exact")
    for grouping in (
        *((field,) for field in FIELDS),
        ("quant_type", "tensor_name"),
        ("quant_type", "layer"),
        ("quant_type", "tensor_name", "layer"),
        ("quant_type", "layer", "sample_idx"),
        ("quant_type", "layer", "rank"),
    ):
        groups = document["by"][",".join(grouping)]
        places = [FIELDS.index(field) for field in grouping]
        expected: dict[tuple[Any, ...], list[np.ndarray]] = {}
        for named, values in known[1].items():
            expected.setdefault(tuple(named[place] for place in places), []).append(values)
        assert {tuple(group[field] for field in grouping) for group in groups} == set(expected)
        assert len(groups) == len(expected)
        kept = {("quant_type", "layer"): "none", ("quant_type", "tensor_name", "layer"): "coarse"}.get(
            grouping
        )
        for group in groups:
            of = expected[tuple(group[field] for field in grouping)]
            assert_group(group, of, quantiles=kept or "exact")
    assert [group["operation"] for group in document["by"]["operation"]] == ["backward", "forward"]
    assert [group["records"] for group in document["by"]["iteration"]] == [len(known[1]) // 2] * 2


def assert_group(group: dict[str, Any], parts: list[np.ndarray], *, quantiles: str) -> None:
    values = np.concatenate([part.ravel() for part in parts]).astype(np.float64)
    finite = values[np.isfinite(values)]
    assert group["records"] == len(parts)
    assert group["count"] == values.size
    assert group["nan"] == np.isnan(values).sum()
    assert group["inf"] == np.isinf(values).sum()
    assert group["zero"] == (values == 0).sum()
    assert (group["min"], group["max"], group["absmax"]) == (finite.min(), finite.max(), np.abs(finite).max())
    np.testing.assert_allclose(
        [group["mean"], group["std"]], [finite.mean(), finite.std()], rtol=1e-9, atol=1e-12
    )
    assert sum(group["exponent_histogram"].values()) == values.size
    if quantiles == "exact":
        assert group["quantiles_exact"] is True  # the float32 tensors hold bfloat16 values
        assert list(group["quantiles"]) == [str(share) for share in SHARES]
        expected = np.quantile(finite, SHARES)
        np.testing.assert_allclose(list(group["quantiles"].values()), expected, rtol=1e-9, atol=1e-12)
    elif quantiles == "coarse":  # within 1/32 of a value, of few values not of what lies between two of them
        assert group["quantiles_exact"] is False
        nearest = [np.quantile(finite, SHARES, method=way) for way in ("lower", "higher")]
        slack = np.abs(nearest) / 32
        found = list(group["quantiles"].values())
        assert (found >= nearest[0] - slack[0]).all()
        assert (found <= nearest[1] + slack[1]).all()
    else:
        assert group["quantiles"] is None


def test_the_text_has_a_table_of_every_grouping(reported: Path) -> None:
    text = (reported / TEXT_NAME).read_text()

    document = json.loads((reported / JSON_NAME).read_text())
    assert text.startswith("capd report of ")
    assert "quantiles are exact" in text
    for grouping in document["by"]:
        assert f"\n{grouping.split(',')[0]} " in text
    [line] = [line for line in text.splitlines() if line.startswith("mxfp8 ") and line.split()[1].isdigit()][
        :1
    ]
    [group] = [group for group in document["by"]["quant_type"] if group["quant_type"] == "mxfp8"]
    assert line.split()[1] == str(group["records"])
    assert f"{group['std']:.6g}" in line


def test_every_page_is_an_image_with_something_on_it(reported: Path) -> None:
    names = sorted(path.name for path in reported.glob("*.png"))

    kinds = {
        "quant_types.png",
        "value_distribution.png",
        "statistics_by_layer.png",
        "statistics_by_iteration.png",
        "boxes_by_type.png",
        "exponents.png",
        "hifp8.png",
        "overflow.png",
        "overflow_formats.png",
        "sqnr_boxes.png",
        "channels.png",
    }
    assert kinds <= set(names)
    maps = [
        name for name in names if name.startswith(("layer_", "sqnr_", "underflow_")) and name not in kinds
    ]
    assert len(maps) == 4 * len(TYPES)
    assert {
        "layer_sample_mxfp8.png",
        f"layer_rank_{ODD_FILE}.png",
        f"sqnr_{ODD_FILE}.png",
        "underflow_mxfp8.png",
    } <= set(maps)
    assert len(names) == len(kinds) + len(maps)
    for name in names:
        image = matplotlib.image.imread(reported / name)
        height, width, _ = image.shape
        assert 300 <= height <= 4000, name
        assert 700 <= width <= 4000, name
        grey = image[..., :3].mean(axis=2)
        assert 0.005 < (grey < 0.9).mean() < 0.9, name  # ink on paper
        assert len(np.unique(grey)) > 20, name


def test_the_umask_says_who_may_read_a_directory(
    capd: Capd, known: tuple[Path, Values], tmp_path: Path, umask: int
) -> None:
    out = tmp_path / "out"
    assert capd("report", known[0], "-o", out, "--quick", "--tensor", "weight", "--layer", "0").code == 0
    assert out.stat().st_mode & 0o777 == 0o777 & ~umask
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o666 & ~umask}


def of_type(known: tuple[Path, Values], one: str, tensor: str | None = None) -> np.ndarray:
    chosen = [v.ravel() for k, v in known[1].items() if k[0] == one and tensor in (None, k[4])]
    return np.concatenate(chosen).astype(np.float64)


def test_overflow_and_hifp8_of_the_json_are_what_the_values_say(
    reported: Path, known: tuple[Path, Values]
) -> None:
    import en_dtypes

    document = json.loads((reported / JSON_NAME).read_text())

    assert {(one["quant_type"], one["format"]) for one in document["overflow"]} == set(
        product(TYPES, ("hifp8", "e4m3", "e5m2", "e2m1", "fp16", "bf16"))
    )
    for one in TYPES:
        values = of_type(known, one)
        finite = values[np.isfinite(values)]
        [found] = [x for x in document["overflow"] if (x["quant_type"], x["format"]) == (one, "e2m1")]
        assert (found["largest"], found["smallest_normal"], found["smallest"]) == (6, 1, 0.5)
        assert (found["count"], found["nan"]) == (values.size, np.isnan(values).sum())
        assert found["above"] == (np.abs(finite) > 6).sum()
        assert found["below"] == ((finite != 0) & (np.abs(finite) < 0.5)).sum()
        assert found["below_severity"] == "high"
        scaled = np.abs(finite) * (6 / np.abs(finite).max())
        assert found["below_scaled"] == ((scaled > 0) & (scaled < 0.5)).sum()
        [use] = [x for x in document["hifp8"] if x["quant_type"] == one]
        codes = finite.astype(np.float32).astype(en_dtypes.hifloat8).view(np.uint8)
        assert (use["finite"], use["exact"]) == (finite.size, True)
        assert use["codes_used"] == len(set(codes.tolist()) - {0x6F, 0xEF})
        assert [regime["regime"] for regime in use["regimes"]] == [
            "zero", "underflow", "DML", "0", "1", "2", "3", "4", "overflow",
        ]  # fmt: skip
        assert sum(regime["count"] for regime in use["regimes"]) == finite.size
    by_exponent = document["error_by_exponent"]
    every = np.concatenate([of_type(known, one) for one in TYPES])
    exponents = np.floor(np.log2(np.abs(every[np.isfinite(every) & (every != 0)]))).astype(int)
    assert by_exponent["exponents"] == sorted(set(exponents.tolist()))
    assert by_exponent["counts"] == [int((exponents == one).sum()) for one in by_exponent["exponents"]]
    assert set(by_exponent["relative_error"]["bf16"]) == {0}


def test_errors_and_channels_of_the_json_are_what_the_values_say(
    reported: Path, known: tuple[Path, Values]
) -> None:
    import torch

    from capd.formats import qdq

    document = json.loads((reported / JSON_NAME).read_text())

    [group] = [
        x
        for x in document["by"]["quant_type,tensor_name"]
        if (x["quant_type"], x["tensor_name"]) == (ODD, "weight")
    ]
    parts = [v for k, v in known[1].items() if (k[0], k[4]) == (ODD, "weight")]
    assert list(group["errors"]) == ["fp8", "mxfp8", "mxfp4", "nvfp4", "hifp8"]
    for fmt, found in group["errors"].items():
        x = np.stack(parts).astype(np.float64)
        y = np.stack([qdq(torch.from_numpy(part.copy()), fmt).numpy() for part in parts]).astype(np.float64)
        sqnr = 10 * np.log10((x**2).sum() / ((y - x) ** 2).sum())
        assert found["sqnr_db"] == pytest.approx(sqnr, rel=1e-9)
        assert found["underflow_percent"] == 100 * ((x != 0) & (y == 0)).sum() / x.size
        assert (found["records"], found["count"]) == (len(parts), x.size)
    [channels] = group["channels"]
    assert (channels["channels"], channels["records"]) == (24, len(parts))
    amax = np.abs(np.stack(parts)).max(axis=(0, 1))
    first = channels["largest"][0]
    assert (first["channel"], first["amax"]) == (int(amax.argmax()), float(amax.max()))
    assert "errors" not in document["by"]["rank"][0]
    text = (reported / TEXT_NAME).read_text()
    assert "\nerror of " in text
    assert f"{group['errors']['mxfp4']['sqnr_db']:.2f}" in text
    assert "\nHiFP8 of " in text
    assert "\noverflow of " in text


def test_formats_are_chosen_or_left_out(quickly: Capd, known: tuple[Path, Values], tmp_path: Path) -> None:
    some = quickly("report", known[0], "-o", tmp_path, "--rank", "0", "--formats", "mxfp8:e5m2,hifp8")
    assert some.code == 0
    assert list(document_of(tmp_path)["all"]["errors"]) == ["mxfp8:e5m2", "hifp8"]
    assert quickly("report", known[0], "-o", tmp_path, "--rank", "0", "--formats", "none").code == 0
    assert document_of(tmp_path)["all"]["errors"] == {}
    assert quickly("report", known[0], "-o", tmp_path, "--formats", "fp3").code == 2


@pytest.fixture
def quickly(capd: Capd, monkeypatch: pytest.MonkeyPatch) -> Capd:
    """`capd report` without its pages, which are not what these tests look at."""
    monkeypatch.setattr("capd.report.figures.pages.all_pages", lambda groups: iter(()))
    return capd


def document_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / JSON_NAME).read_text())
    return found


def test_quick_reads_no_element_and_has_the_same_statistics(
    quickly: Capd, known: tuple[Path, Values], reported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from capd.store.read.series import Series

    monkeypatch.setattr(Series, "read", lambda *_: pytest.fail("an element was read"))

    assert quickly("report", known[0], "-o", tmp_path / "out", "--quick").code == 0

    quick, whole = document_of(tmp_path / "out"), document_of(reported)
    assert quick["quick"] is True
    assert (quick["hifp8"], quick["error_by_exponent"], quick["overflow"]) == ([], None, [])
    for grouping, groups in quick["by"].items():
        for one, other in zip(groups, whole["by"][grouping], strict=True):
            assert one["quantiles"] is None
            changed = {"quantiles", "quantiles_exact", "errors", "channels"}
            assert {k: v for k, v in one.items() if k not in changed} == {
                k: v for k, v in other.items() if k not in changed
            }
    assert "--quick" in (tmp_path / "out" / TEXT_NAME).read_text()


def test_a_sample_reads_some_records_of_each_series_and_keeps_all_statistics(
    quickly: Capd, known: tuple[Path, Values], reported: Path, tmp_path: Path
) -> None:
    found = quickly("report", known[0], "-o", tmp_path / "out", "--sample", "1%")

    assert found.code == 0
    some, whole = document_of(tmp_path / "out"), document_of(reported)
    assert whole["sample"] is None
    assert some["sample"]["share"] == 0.01
    assert 0 < some["sample"]["records"] < some["sample"]["of_records"] == whole["all"]["records"]
    for one, other in zip(some["by"]["tensor_name"], whole["by"]["tensor_name"], strict=True):
        assert {name: one[name] for name in ("records", "count", "mean", "std", "absmax")} == {
            name: other[name] for name in ("records", "count", "mean", "std", "absmax")
        }
    said = f"{some['sample']['records']} of {some['sample']['of_records']} records were read"
    assert said in found.err
    assert said in (tmp_path / "out" / TEXT_NAME).read_text()
    page = (tmp_path / "out" / "report.html").read_text()
    assert f'"{some["sample"]["records"]}","{some["sample"]["of_records"]}"' in page
    assert quickly("report", known[0], "-o", tmp_path / "none", "--sample", "1%", "--quick").code == 2
    assert not (tmp_path / "none" / JSON_NAME).exists()


@pytest.mark.slow
def test_quick_draws_everything_that_needs_no_element(
    capd: Capd, known: tuple[Path, Values], tmp_path: Path
) -> None:
    done = capd("report", known[0], "-o", tmp_path, "--quick", "--quant-type", ODD, "--json")

    pages = {name for name in done.json["files"] if name.endswith(".png")}
    assert pages == {
        "quant_types.png", "statistics_by_layer.png", f"layer_sample_{ODD_FILE}.png", f"layer_rank_{ODD_FILE}.png",
        "statistics_by_iteration.png", "boxes_by_type.png", "exponents.png", "overflow.png",
    }  # fmt: skip


def test_the_selection_is_that_of_ls(quickly: Capd, known: tuple[Path, Values], tmp_path: Path) -> None:
    options = ("--quant-type", "mxfp8", "--layer", "1,none", "--rank", "0", "--tensor", "grad_output")

    assert quickly("report", known[0], "-o", tmp_path, *options).code == 0

    chosen = [
        v
        for k, v in known[1].items()
        if k[0] == "mxfp8" and k[1] == 0 and k[2] in (1, None) and k[4] == "grad_output"
    ]
    assert_group(document_of(tmp_path)["all"], chosen, quantiles="exact")


def test_an_empty_selection_exits_with_5_and_leaves_nothing(
    capd: Capd, known: tuple[Path, Values], tmp_path: Path
) -> None:
    done = capd("report", known[0], "-o", tmp_path / "out", "--rank", "77")

    assert done.code == 5
    assert "matches the selection" in done.err
    assert not (tmp_path / "out").exists()
    assert capd("report", known[0], "-o", tmp_path / "out", "--layer", "x").code == 2


def test_a_record_that_keeps_statistics_alone_counts_without_quantiles(
    quickly: Capd, both_kinds: Path, tmp_path: Path
) -> None:
    assert quickly("report", both_kinds, "-o", tmp_path).code == 0

    whole = document_of(tmp_path)["all"]
    assert (whole["records"], whole["count"], whole["nan"], whole["inf"]) == (2, 16, 2, 2)
    assert whole["quantiles"]["0.5"] == np.quantile([1.0, -2.0, 0.0, 0.5, 4.0, 0.0], 0.5)


def test_of_a_store_the_newest_run_is_taken_or_all_of_them_together(
    quickly: Capd, store_root: Path, tmp_path: Path
) -> None:
    newest = quickly("report", store_root, "-o", tmp_path / "newest", "--json")
    every = quickly("report", store_root, "-o", tmp_path / "every", "--all-runs", "--json")
    both = quickly("report", store_root, "-o", tmp_path / "both", "--all-runs", "--run", "first")

    assert (newest.json["records"], every.json["records"], both.code) == (6, 7, 2)
    assert "the newest of 2 runs" in newest.err
    assert len(document_of(tmp_path / "every")["sources"]) == 2


def test_a_damaged_record_is_named_skipped_and_counted_and_the_rest_delivered(
    quickly: Capd, tmp_path: Path
) -> None:
    run = damaged(tmp_path)

    done = quickly("report", run, "-o", tmp_path / "out", "--json")

    assert done.code == 4
    assert done.json["records"] == 3
    [skipped] = done.json["skipped"]
    assert skipped["name"].endswith(".input#1")
    assert f"skipped {skipped['name']}: " in done.err
    document = document_of(tmp_path / "out")
    assert document["skipped"] == [skipped]
    assert [group["iteration"] for group in document["by"]["iteration"]] == [0, 2, 3]
    assert "skipped: 1" in (tmp_path / "out" / TEXT_NAME).read_text()


def test_where_nothing_can_be_read_there_is_no_report(quickly: Capd, tmp_path: Path) -> None:
    run = damaged(tmp_path)
    shard = shard_of(run)
    shard.write_bytes(bytes(shard.stat().st_size))

    done = quickly("report", run, "-o", tmp_path / "out")

    assert (done.code, done.out) == (4, "")
    assert "none of 4" in done.err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.fault
def test_a_second_report_replaces_its_own_files_and_removes_pages_that_are_gone(
    capd: Capd, known: tuple[Path, Values], tmp_path: Path
) -> None:
    first = capd("report", known[0], "-o", tmp_path, "--quick", "--quant-type", ODD, "--json").json
    (tmp_path / "mine.png").write_bytes(b"somebody's picture")
    (tmp_path / ".capd-report-overflow.png").write_bytes(b"of a report that was killed")

    second = capd("report", known[0], "-o", tmp_path, "--quick", "--quant-type", "mxfp8", "--json").json

    assert f"layer_rank_{ODD_FILE}.png" in first["files"]
    assert {path.name for path in tmp_path.iterdir()} == {*second["files"], "mine.png"}
    assert [group["quant_type"] for group in document_of(tmp_path)["by"]["quant_type"]] == ["mxfp8"]


@pytest.mark.parametrize("name", [JSON_NAME, "quant_types.png"])
@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_a_file_that_no_report_wrote_is_never_replaced(
    capd: Capd, known: tuple[Path, Values], tmp_path: Path, name: str, kind: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "target").write_bytes(b'{"written_by": "capd report"}')
    if kind == "file":
        (out / name).write_bytes(b"mine")
    elif kind == "link":
        (out / name).symlink_to(tmp_path / "target")
    else:
        (out / name).mkdir()

    done = capd("report", known[0], "-o", out, "--quick", "--quant-type", ODD, "--rank", "0")

    assert done.code == 1
    assert f"{out / name} is there" in done.err
    assert (tmp_path / "target").read_bytes() == b'{"written_by": "capd report"}'
    assert (out / name).is_symlink() or (out / name).is_dir() or (out / name).read_bytes() == b"mine"


def test_a_full_disk_exits_with_6_and_leaves_whole_files_alone(
    capd: Capd, known: tuple[Path, Values], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from capd.report import directory

    def full(path: Path, parts: list[bytes], mode: int) -> int:
        if path.suffix != ".png":
            return new_file(path, parts, mode)
        new_file(path, [parts[0][:100]], mode)
        raise OSError(errno.ENOSPC, "No space left on device")

    new_file = directory.new_file
    monkeypatch.setattr(directory, "new_file", full)

    done = capd("report", known[0], "-o", tmp_path, "--quick", "--rank", "0")

    assert done.code == 6
    assert "the file system" in done.err
    assert "make room there; the files in it are complete" in done.err
    assert {path.name for path in tmp_path.iterdir()} == {JSON_NAME, TEXT_NAME, "report.html"}
    assert document_of(tmp_path)["all"]["records"] == len(known[1]) // 2


def test_two_reports_at_once_into_one_directory_are_refused(
    capd: Capd, known: tuple[Path, Values], tmp_path: Path
) -> None:
    import fcntl

    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        done = capd("report", known[0], "-o", tmp_path)
    finally:
        os.close(fd)

    assert done.code == 7
    assert "another export or report writes to" in done.err


@pytest.mark.slow
def test_without_matplotlib_the_numbers_stand_and_the_message_says_how_to_install_it(
    known: tuple[Path, Values], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MATPLOTLIB, "report", str(known[0]), "-o", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 2
    assert 'pip install "capd[plot]"' in done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {JSON_NAME, TEXT_NAME, "report.html"}
    assert document_of(tmp_path / "out")["all"]["records"] == len(known[1])


@pytest.mark.slow
def test_ctrl_c_exits_with_130_and_leaves_whole_files_alone(
    known: tuple[Path, Values], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "capd", "report", str(known[0]), "-o", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not list(out.glob("[a-z]*.png")):
            pass
        process.send_signal(signal.SIGINT)
        said, problems = process.communicate(timeout=30)

    assert (process.returncode, said, problems) == (130, "", "")
    left = {path.name for path in out.iterdir()}
    assert {JSON_NAME, TEXT_NAME} < left
    assert not [name for name in left if name.startswith(".")]
    for page in out.glob("*.png"):
        assert matplotlib.image.imread(page).size
    assert document_of(out)["all"]["records"] == len(known[1])
    assert len(left) < 5 + 2 * len(TYPES) + 2
