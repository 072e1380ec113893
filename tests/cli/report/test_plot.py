"""`capd plot` on runs and on tensor files: what it writes, says and refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from capd.cli.report.plot import _KINDS
from capd.report.figures.kinds import KINDS
from capd_client.protocol.key import Moment
from tests.kit.store.cli import WITHOUT_MATPLOTLIB, Result, StoreWriter, bf16_bits, damaged, linear_key

Capd = Callable[..., Result]
TYPES, LAYERS, TENSORS = ("bf16", "hi$f_p8"), (0, 1), ("input", "grad_output")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two types, two layers, two iterations, two tensors, and a type of statistics alone."""
    root, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(5)
    writer = StoreWriter(root)
    for one, layer, iteration, tensor in product((*TYPES, "kept"), LAYERS, (0, 1), TENSORS):
        key = linear_key(quant_type=one, layer=layer, tensor_name=tensor, module=f"blocks.{layer}.{tensor}")
        bits = bf16_bits(rng.normal(scale=1 + layer, size=(16, 32)))
        moment = Moment(iteration=iteration, sample_idx=iteration, time_ns=1)
        writer.put("run", key, bits, "bfloat16", moment, payload=one != "kept")
    return writer.close() / "run.zarr"


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ("boxes", "tensor") else pytest.mark.fault) for kind in KINDS],
)
def test_every_kind_is_drawn_from_a_run(capd: Capd, run: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "x.png"

    done = capd(
        "plot", run, kind, "-o", out, "--quant-type", "bf16", "--tensor", "input", "--dpi", "50", "--size", "6x5",
        "--json",
    )  # fmt: skip

    assert (done.code, done.err) == (0, "")
    assert done.json == {
        "kind": kind, "files": [str(out)], "records": 4, "raw_bytes": 4096, "quant_types": ["bf16"],
        "sample": None, "skipped": [],
    }  # fmt: skip
    assert matplotlib.image.imread(out).shape == (250, 300, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]


def test_the_umask_says_who_may_look_at_a_figure(capd: Capd, run: Path, tmp_path: Path, umask: int) -> None:
    out = tmp_path / "x.svg"
    assert capd("plot", run, "layers", "-o", out, "--quant-type", "bf16", "--tensor", "input").code == 0
    assert out.stat().st_mode & 0o777 == 0o666 & ~umask


def test_the_help_names_every_kind(capd: Capd) -> None:
    assert _KINDS.split(", ") == list(KINDS)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("histogram", "-o", "x.png"), "is not a kind of figure; use one of distribution, exponents,"),
        (("layers", "-o", "x.gif"), "the name must end in .png, .svg, .pdf"),
        (("layers", "-o", "x.png", "--size", "3,2"), "as 3.3x2.5"),
        (("layers", "-o", "x.png", "--size", "0x2"), "as 3.3x2.5"),
        (
            ("layers", "-o", "x.png", "--formats", "mxfp8"),
            "layers takes no --formats; exponents, heatmap, boxes",
        ),
        (("hifp8", "-o", "x.png", "--log"), "hifp8 takes no --log"),
        (("heatmap", "-o", "x.png", "--metric", "beauty"), "use one of sqnr, underflow,"),
        (("heatmap", "-o", "x.png", "--formats", "mxfp9"), "mxfp9"),
        (("boxes", "-o", "x.png", "--metric", "sqnr"), "--formats"),
        (("layers", "-o", "x.png", "--layer", "x"), ""),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is_read(
    capd: Capd, run: Path, tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    done = capd("plot", run, *options, cwd=tmp_path)

    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert not list(tmp_path.iterdir())


def test_nothing_selected_and_nothing_to_draw_exit_with_5(capd: Capd, run: Path, tmp_path: Path) -> None:
    selected = capd("plot", run, "layers", "-o", tmp_path / "x.png", "--rank", "9")
    no_elements = capd("plot", run, "distribution", "-o", tmp_path / "x.png", "--quant-type", "kept")
    no_errors = capd("plot", run, "heatmap", "-o", tmp_path / "x.png", "--quant-type", "kept")
    one_layer = capd("plot", run, "boxes", "-o", tmp_path / "x.png", "--layer", "1")

    assert {one.code for one in (selected, no_elements, no_errors, one_layer)} == {5}
    assert "matches the selection" in selected.err
    assert "only statistics were kept" in no_elements.err
    assert "no selected record has high-precision values" in no_errors.err
    assert "a single layer" in one_layer.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", ["file", "link"])
def test_what_is_there_is_replaced_with_force_alone(
    capd: Capd, run: Path, tmp_path: Path, there: str
) -> None:
    out, target = tmp_path / "x.svg", tmp_path / "target"
    target.write_bytes(b"mine")
    if there == "link":
        out.symlink_to(target)
    else:
        out.write_bytes(b"mine")
    options = ("plot", run, "layers", "-o", out, "--tensor", "input")

    refused = capd(*options)

    assert refused.code == 1
    assert "--force" in refused.err
    assert out.read_bytes() == b"mine"
    assert capd(*options, "--force").code == 0
    assert out.read_bytes().startswith(b"<?xml")
    assert target.read_bytes() == b"mine"


def test_the_same_records_give_the_same_bytes(capd: Capd, run: Path, tmp_path: Path) -> None:
    for name in ("a.pdf", "b.pdf"):
        assert capd("plot", run, "exponents", "-o", tmp_path / name, "--tensor", "input").code == 0

    assert (tmp_path / "a.pdf").read_bytes() == (tmp_path / "b.pdf").read_bytes()


def test_several_pages_are_numbered_files(capd: Capd, run: Path, tmp_path: Path) -> None:
    options = ("plot", run, "heatmap", "-o", tmp_path / "map.png", "--formats", "hifp8", "--dpi", "40")

    done = capd(*options)

    assert done.code == 0
    names = ["map_1.png", "map_2.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [line.split(": ")[0] for line in done.out.splitlines()] == [str(tmp_path / name) for name in names]
    assert "8 records have no format error: only its statistics were kept" in done.err
    (tmp_path / "map_1.png").unlink()
    assert capd(*options).code == 1
    assert not (tmp_path / "map_1.png").exists()


@pytest.mark.slow
def test_stored_statistics_are_enough_where_no_element_is_drawn(
    capd: Capd, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from capd.store.read.series import Series

    monkeypatch.setattr(Series, "read", lambda *_: pytest.fail("an element was read"))

    for kind in ("layers", "iterations", "exponents", "boxes"):
        out = tmp_path / f"{kind}.png"
        assert capd("plot", run, kind, "-o", out, "--tensor", "input", "--dpi", "40").code == 0


def test_a_damaged_record_is_named_and_the_rest_drawn(capd: Capd, tmp_path: Path) -> None:
    done = capd("plot", damaged(tmp_path), "distribution", "-o", tmp_path / "x.png", "--json")

    assert done.code == 4
    assert done.json["records"] == 3
    assert done.json["skipped"][0]["name"].endswith(".input#1")
    assert (tmp_path / "x.png").exists()


def test_tensor_files_of_tensor_saver_are_drawn_where_they_lie(capd: Capd, run: Path, tmp_path: Path) -> None:
    files = tmp_path / "files"
    exported = capd("export", run, "--to", "pt", "--out", files, "--quant-type", "bf16")
    assert exported.code == 0
    (files / "bad.pt").write_bytes(b"no tensor")

    done = capd("plot", files, "distribution", "-o", tmp_path / "x.pdf", "--tensor", "input", "--json")

    assert (done.code, done.json["records"], len(done.json["skipped"])) == (1, 4, 1)
    assert (tmp_path / "x.pdf").read_bytes().startswith(b"%PDF-")


def test_a_place_that_cannot_be_written_to_is_said(capd: Capd, run: Path, tmp_path: Path) -> None:
    done = capd("plot", run, "layers", "-o", tmp_path / "nowhere" / "x.png", "--tensor", "input")

    assert done.code == 1
    assert "cannot write" in done.err


def test_without_matplotlib_the_message_says_how_to_install_it(run: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MATPLOTLIB, "plot", str(run), "layers", "-o", str(tmp_path / "x.png")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (2, "")
    assert 'pip install "capd[plot]"' in done.stderr
