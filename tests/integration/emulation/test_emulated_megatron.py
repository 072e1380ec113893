"""Megatron's layers with emulation compute the formula on the whole operands, on one rank and on two."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from capd_client.formats import qdq
from tests.integration.emulation.emulated_formulas import close, exact_attention
from tests.integration.emulation.emulated_megatron_job import LINEARS, RECIPE, SEQUENCE, SIZE, operands
from tests.kit import forking
from tests.kit.paths import REPOSITORY

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

Found = list[dict[str, dict[str, Tensor]]]  # of each rank, by case and name

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> Iterator[Found]:
    with tempfile.TemporaryDirectory(prefix="capd-megatron-") as directory:
        done = forking.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(request.param),
             "-m", "tests.integration.emulation.emulated_megatron_job", directory],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True, text=True, timeout=200, inner=forking.TRAINING,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        yield [
            torch.load(Path(directory) / f"rank{rank}.pt", weights_only=True) for rank in range(request.param)
        ]


def whole(ranks: Found, case: str, name: str, axis: int | None) -> Tensor:
    """A tensor of all ranks; axis None: they all have the same."""
    parts = [rank[case][name] for rank in ranks]
    if axis is None:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    return torch.cat(parts, axis)


@pytest.mark.parametrize("case", LINEARS)
def test_a_parallel_linear_multiplies_what_is_quantised_along_each_products_contraction(
    case: str, ranks: Found
) -> None:
    if case not in ranks[0]:
        pytest.skip("a sequence of one rank has no parts")
    given, q = operands(case), partial(qdq, fmt=RECIPE["linear"])
    x, w, dy = given["input"], given["weight"], given["grad_output"]
    rows, dy_rows = x.flatten(0, 1), dy.flatten(0, 1)
    column, sequence = case.startswith("column"), case.endswith("_sp")

    output = q(x) @ q(w).T
    close(whole(ranks, case, "output", 2 if column else 0 if sequence else None), output)
    assert (output - x @ w.T).norm() > 1e-3 * output.norm()
    close(
        whole(ranks, case, "plain", 2 if column else 0 if sequence else None), x @ w.T
    )  # once it is removed

    grad_input = q(dy) @ q(w, axis=0)
    close(whole(ranks, case, "grad_input", (0 if sequence else None) if column else 2), grad_input)

    grad_weight = q(dy_rows, axis=0).T @ q(rows, axis=0)
    if case == "column_frozen":
        assert "grad_weight" not in ranks[0][case]
    elif case == "column_fused":
        close(whole(ranks, case, "main_grad", 0), 1 + grad_weight)  # added to what was there
        assert not whole(ranks, case, "grad_weight", 0).any()  # a placeholder
    else:
        close(whole(ranks, case, "grad_weight", 0 if column else 1), grad_weight)


def test_core_attention_multiplies_what_is_quantised_in_both_products(ranks: Found) -> None:
    given = {
        name: tensor.unflatten(2, (-1, SIZE)) if tensor.dim() == 3 else tensor
        for name, tensor in operands("attention").items()
    }
    expected = exact_attention(
        *(given[name].permute(1, 2, 0, 3) for name in ("query", "key", "value", "grad_output")),
        qk=RECIPE["qk"], pv=RECIPE["pv"], mask=torch.ones(SEQUENCE, SEQUENCE).triu(1) * -10000,
    )  # fmt: skip

    for name, tensor in expected.items():
        sbhd = tensor.permute(2, 0, 1, 3)
        close(whole(ranks, "attention", name, 2), sbhd.flatten(2) if name == "output" else sbhd)
