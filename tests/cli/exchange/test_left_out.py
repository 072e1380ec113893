"""The JSON of `capd export` says which records are in no file, and why, in the same words for every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capd_client.protocol.key import Moment
from capd_client.protocol.scalars import scalar_key
from tests.kit.store.cli import Result, StoreWriter, linear_key

Capd = Callable[..., Result]
BITS = np.ones((4, 2), np.float32)
PART = {
    "tensor_class": "torchao.quantization.MXTensor",
    "tensor_shape": [4, 2],
    "tensor_dtype": "torch.float32",
    "tensor_parts": {"qdata": [[4, 2], [2, 1]], "scale": [[4, 1], [1, 1]]},
    "tensor_context": "{}",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A weight, an input in two blocks of a rank, the same input in fp32, and one part of a quantised bias."""
    writer = StoreWriter(tmp_path_factory.mktemp("captures"))

    def put(name: str, bits: Any = BITS, dtype: str = "float32", **more: Any) -> None:
        key = linear_key(tensor_name=name, quant_type=more.pop("quant_type", "bf16"))
        writer.put("exp", key, bits, dtype, Moment(time_ns=1), **more)

    put("weight")
    put("input", attributes={"tp_rank": 0, "tp_size": 2, "tp_placement": "S(0):2"})
    put("input", quant_type="fp32")
    put("bias.qdata", BITS.astype(np.int8), "int8", attributes=PART, quant_type="int8")
    writer.put("exp", scalar_key("loss", 0), np.array(1.0), "float64", Moment())
    return writer.close() / "exp.zarr"


@pytest.mark.parametrize(
    ("to", "reasons", "records"),
    [
        ("pt", [], 4),
        ("npz", [], 4),
        ("csv", [], 1),
        ("tensorboard", [], 5),
        ("sglang", ["sglang's comparator: tp_placement 'S(0):2' has no word in its grammar"], 3),
        (
            "msprobe",
            ["another record has their place in dump.json", "a part of their quantised tensor is missing"],
            2,
        ),
    ],
)
def test_what_is_left_out_is_named_and_counted(
    capd: Capd, run: Path, tmp_path: Path, to: str, reasons: list[str], records: int
) -> None:
    if to == "tensorboard":
        pytest.importorskip("tensorboard", reason="the extra `tensorboard`")

    done = capd("export", run, "--to", to, "-o", tmp_path / "out", "--json")

    assert (done.code, done.json["records"]) == (0, records), done.err
    assert done.json["left_out"] == [{"reason": reason, "records": 1} for reason in reasons]
    assert [f"1 record left out, because {reason}" in done.err for reason in reasons] == [True] * len(reasons)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert done.json["files"] == len(files)


def test_a_run_of_scalars_alone_goes_to_tensorboard(capd: Capd, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard`")
    writer = StoreWriter(tmp_path / "captures")
    writer.put("exp", scalar_key("loss", 0), np.array(1.0), "float64", Moment())

    run = writer.close() / "exp.zarr"

    done = capd("export", run, "--to", "tensorboard", "-o", tmp_path / "out", "--json")
    nothing = capd(
        "export", run, "--to", "tensorboard", "--tensor", "nope", "-o", tmp_path / "none", "--json"
    )

    assert (done.code, done.json["records"]) == (0, 1)
    assert (nothing.code, nothing.out) == (5, "")
    assert not (tmp_path / "none").exists()
