"""The notebook of the examples runs from its first cell to its last on a real run."""

from __future__ import annotations

import gc
import json
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest

from capd_client.protocol.key import Moment
from tests.docs import blocks
from tests.kit.paths import REPOSITORY
from tests.kit.store.cli import StoreWriter, bf16_bits, linear_key

NOTEBOOK = REPOSITORY / "examples" / "analyse.ipynb"


@pytest.fixture
def captures(tmp_path: Path) -> Path:
    """A store root with one run: two layers, three tensors, two iterations."""
    root, rng = tmp_path / "captures", np.random.default_rng(1)
    writer = StoreWriter(root)
    for layer, tensor, iteration in product(range(2), ("input", "weight", "grad_output"), (0, 3)):
        key = linear_key(
            layer=layer,
            tensor_name=tensor,
            module=f"layers.{layer}.up",
            operation="backward" if tensor == "grad_output" else "forward",
        )
        writer.put(
            "first",
            key,
            bf16_bits(rng.normal(size=(32, 64))),
            "bfloat16",
            Moment(iteration=iteration, time_ns=1),
        )
    writer.close()
    return root


def test_every_cell_of_the_notebook_runs(captures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib.use("Agg")
    monkeypatch.chdir(captures.parent)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    session: dict[str, Any] = {}
    drawn = {}

    for cell in cells:
        value = blocks.run_python("".join(cell["source"]), f"{NOTEBOOK.name}:{cell['id']}", session)
        show = getattr(value, "_repr_html_", None)
        drawn[cell["id"]] = show() if show else None
    figures = len(plt.get_fignums())
    plt.close("all")
    session.clear()
    gc.collect()

    assert [
        name for name in ("open", "find", "series", "record", "xarray", "compare") if not drawn[name]
    ] == []
    assert "layers.1.up" in drawn["series"]
    assert figures == 2
