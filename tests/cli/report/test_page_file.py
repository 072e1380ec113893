"""`capd report -o FILE.html`: what is written where, and what it never replaces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capd_client.protocol.key import Moment
from tests.kit.store.cli import Result, StoreWriter, bf16_bits, linear_key

Capd = Callable[..., Result]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    writer = StoreWriter(root)
    for tensor in ("input", "weight"):
        bits = bf16_bits(np.random.default_rng(3).normal(size=(8, 32)))
        writer.put("run", linear_key(tensor_name=tensor), bits, "bfloat16", Moment(iteration=0, time_ns=1))
    writer.close()
    return root / "run.zarr"


def data_of(page: Path) -> Any:
    found = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_name_that_ends_in_html_is_one_file(capd: Capd, store: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    done = capd("report", store, "-o", out, "--json", "--formats", "mxfp8,nvfp4:16x16")
    assert done.code == 0
    assert done.json == {
        "file": str(out), "records": 2, "raw_bytes": 1024, "quant_types": ["bf16"],
        "sample": None, "files": ["report.html"], "skipped": [],
    }  # fmt: skip
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
    data = data_of(out)
    assert data["formats"] == ["mxfp8", "nvfp4:16x16"]
    assert len(data["series"]) == 2


def test_the_umask_says_who_may_read_a_page(capd: Capd, store: Path, tmp_path: Path, umask: int) -> None:
    out = tmp_path / "report.html"
    assert capd("report", store, "-o", out, "--quick").code == 0
    assert out.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.slow
def test_a_directory_has_the_same_page_beside_its_files(capd: Capd, store: Path, tmp_path: Path) -> None:
    assert capd("report", store, "-o", tmp_path / "all", "--json").code == 0
    assert capd("report", store, "-o", tmp_path / "one.html").code == 0
    assert (tmp_path / "all/report.html").read_bytes() == (tmp_path / "one.html").read_bytes()
    assert (tmp_path / "all/global_statistics.json").exists()


def test_an_earlier_report_is_replaced_and_nothing_else_but_by_force(
    capd: Capd, store: Path, tmp_path: Path
) -> None:
    out, link = tmp_path / "report.html", tmp_path / "link.html"
    out.write_text("<p>mine</p>")
    link.symlink_to(out)
    for path in (out, link):
        refused = capd("report", store, "-o", path, "--quick")
        assert (refused.code, "no report wrote it" in refused.err, "--force" in refused.err) == (
            1,
            True,
            True,
        )
    assert out.read_text() == "<p>mine</p>"
    assert capd("report", store, "-o", out, "--quick", "--force").code == 0
    assert data_of(out)["quick"] is True
    assert capd("report", store, "-o", out).code == 0
    assert data_of(out)["quick"] is False


def test_what_cannot_be_done_is_said_and_leaves_no_file(capd: Capd, store: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert capd("report", store, "-o", out, "--layer", "77").code == 5
    unknown = capd("report", store, "-o", out, "--formats", "mxfp8,fp7")
    assert (unknown.code, "fp7" in unknown.err) == (2, True)
    nowhere = capd("report", store, "-o", tmp_path / "no" / "report.html", "--quick")
    assert (nowhere.code, "choose another place" in nowhere.err) == (1, True)
    assert capd("report", store, "-o", tmp_path / "dir", "--force").code == 2
    paper = capd("report", store, "-o", tmp_path / "report.pdf", "--quick")
    assert (paper.code, "`capd plot` draws" in paper.err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_several_runs_are_told_apart_by_the_run_before_the_quant_type(
    capd: Capd, store: Path, tmp_path: Path
) -> None:
    writer = StoreWriter(tmp_path / "other")
    bits = bf16_bits(np.random.default_rng(4).normal(size=(8, 32)))
    writer.put("exp7", linear_key(tensor_name="input"), bits, "bfloat16", Moment(iteration=0, time_ns=1))
    writer.close()
    out = tmp_path / "both.html"

    done = capd("report", store, tmp_path / "other", "-o", out, "--formats", "none", "--json")

    assert (done.code, done.json["quant_types"], done.json["records"]) == (0, ["exp7: bf16", "run: bf16"], 3)
    data = data_of(out)
    assert data["title"] == "run, exp7"
    assert [(one["quant_type"], one["series"]) for one in data["types"]] == [
        ("exp7: bf16", 1),
        ("run: bf16", 2),
    ]
    assert {one["path"].partition("/")[0] for one in data["series"]} == {"exp7", "run"}
    assert len(data["ledger"]) == 2
    sampled = capd(
        "report", store, tmp_path / "other", "-o", out, "--formats", "none", "--sample", "5%", "--json"
    )
    assert sampled.json["sample"]["of_records"] == 3
    assert "of 3 records were read" in sampled.err


def test_runs_that_cannot_stand_side_by_side_are_refused(capd: Capd, store: Path, tmp_path: Path) -> None:
    for again in (store, store.parent / "." / ".." / store.parent.name):
        twice = capd("report", store, again, "-o", tmp_path / "x.html", "--quick")
        assert (twice.code, "given twice" in twice.err) == (2, True)
    assert capd("export", store, "--to", "pt", "-o", tmp_path / "files").code == 0
    mixed = capd("report", store, tmp_path / "files", "-o", tmp_path / "x.html")
    assert (mixed.code, "`capd import`" in mixed.err) == (2, True)
    assert not (tmp_path / "x.html").exists()


def test_tensor_files_have_a_page_too(capd: Capd, store: Path, tmp_path: Path) -> None:
    assert capd("export", store, "--to", "pt", "-o", tmp_path / "files").code == 0
    out = tmp_path / "report.html"
    assert capd("report", tmp_path / "files", "-o", out).code == 0
    data = data_of(out)
    assert (data["all"]["records"], data["ledger"], len(data["series"])) == (2, [], 2)
