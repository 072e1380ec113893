"""`capd compare --logical` on Megatron in many layouts: sound ones are within the limits, bugs are found and named."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.jobs.layouts import Layout, run_layout
from tests.kit.store.cli import run_capd
from tests.kit.tiers import rows

pytestmark = pytest.mark.timeout(400)

DENSE = Layout(layers=3, groups=2, rows=1)
MOE = Layout(layers=2, groups=2, rows=1, experts=4)
BIASED = Layout(layers=3, groups=2, rows=1, config={"add_bias_linear": True})
TWO_STEPS = replace(DENSE, steps=2)
NORMS = replace(DENSE, norms=True)
EPS = {"float32": "1.2e-7", "bfloat16": "7.8e-3"}
NARROW = ", bfloat16"

LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "tp2": (DENSE, {"tp": 2, "ranks": 2}),
    "tp2sp": (DENSE, {"tp": 2, "sp": True, "ranks": 2}),
    "tp4groups": (DENSE, {"tp": 4, "ranks": 4}),
    "pp2vpp2": (replace(DENSE, layers=4), {"pp": 2, "vpp": 2, "ranks": 2}),
    "cp2": (DENSE, {"cp": 2, "ranks": 2}),
    "dp2": (DENSE, {"ranks": 2}),
    "ep2": (MOE, {"ep": 2, "ranks": 2}),
    "tp2sp, two steps": (TWO_STEPS, {"tp": 2, "sp": True, "ranks": 2}),
    "tp2 with biases": (BIASED, {"tp": 2, "ranks": 2}),
}
LAYOUTS |= {
    f"{name}{NARROW}": (replace(layout, dtype="bfloat16"), sizes)
    for name, (layout, sizes) in LAYOUTS.items()
    if layout.steps == 1
}
FC2, QKV = "mlp.linear_fc2", "self_attention.linear_qkv"
# The bug and a remark, its layout, the first divergent tensor, the tensor before it, and the sizes that the factor
# equals.
BUGS: dict[str, tuple[Layout, dict[str, Any], str, str | None, list[str]]] = {
    "norm_gradient_not_reduced": (
        TWO_STEPS, {"tp": 2, "sp": True, "ranks": 2}, f"decoder.layers.1.{QKV}.forward.input",
        f"decoder.layers.0.{FC2}.forward.output", [],
    ),
    "norm_gradient_not_reduced, captured": (
        NORMS, {"tp": 2, "sp": True, "ranks": 2}, "decoder.layers.1.input_layernorm.backward.main_grad",
        f"decoder.layers.0.{QKV}.backward.grad_input", [],
    ),
    "bias_twice": (
        BIASED, {"tp": 2, "ranks": 2}, f"decoder.layers.2.{QKV}.forward.input",
        f"decoder.layers.1.{FC2}.forward.output", [],
    ),
    "gate_and_up_swapped": (
        DENSE, {"tp": 2, "ranks": 2}, "decoder.layers.1.mlp.linear_fc1.forward.weight",
        "decoder.layers.1.self_attention.linear_proj.forward.output", [],
    ),
    "contiguous_data": (DENSE, {"cp": 2, "ranks": 2}, f"decoder.layers.0.{QKV}.forward.input", None, []),
    "keys_of_another_group": (
        DENSE, {"tp": 4, "ranks": 4}, "decoder.layers.1.self_attention.core_attention.forward.key",
        f"decoder.layers.1.{QKV}.forward.output", [],
    ),
    "loss_over_cp_twice": (
        DENSE, {"cp": 2, "ranks": 2}, "output_layer.backward.grad_output", "output_layer.forward.output",
        ["1/cp_size"],
    ),
    "loss_over_micro_batches_twice": (
        DENSE, {"tp": 2, "ranks": 2}, "output_layer.backward.grad_output", "output_layer.forward.output",
        ["1/micro_batches"],
    ),
    "output_not_reduced": (
        DENSE, {"tp": 2, "ranks": 2}, f"decoder.layers.2.{QKV}.forward.input",
        f"decoder.layers.1.{FC2}.forward.output", [],
    ),
    "weight_scaled": (
        DENSE, {"tp": 2, "ranks": 2}, f"decoder.layers.1.{FC2}.forward.weight",
        "decoder.layers.1.mlp.linear_fc1.forward.output", [],
    ),
}  # fmt: skip
BUGS |= {
    f"{name}{NARROW}": (replace(layout, dtype="bfloat16"), *rest)
    for name, (layout, *rest) in BUGS.items()
    if layout.steps == 1
}

# The runs of several tests; those of one test are removed after it.
SHARED = (
    replace(LAYOUTS["tp2sp"][0], **LAYOUTS["tp2sp"][1]),
    replace(DENSE, cp=2, ranks=2, plugin="tests.kit.models.layout_bugs:loss_over_cp_twice"),
)


class Runs:
    """The runs of layouts, perturbed or not. Each is trained when a test first asks for it."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._known, self._trained = directory, dict[tuple[str, str], Path](), 0

    def __call__(self, layout: Layout, perturb: str = "") -> Path:
        place = (layout.json(), perturb)
        if place not in self._known:
            settings = {"CAPD_PERTURB": perturb} if perturb else {}
            self._known[place] = run_layout(layout, self._directory, f"run{self._trained}", **settings)
            self._trained += 1
        return self._known[place]

    def forget(self, layout: Layout) -> None:
        """Remove a run that no other test needs: all of them at once would take longer than a test may."""
        if layout not in SHARED:
            shutil.rmtree(self._known.pop((layout.json(), "")))


@pytest.fixture(scope="module")
def run() -> Iterator[Runs]:
    """Gives the run of a layout."""
    with tempfile.TemporaryDirectory(prefix="capd-compared-") as name:
        yield Runs(Path(name))


def compared(run: Runs, reference: Layout, other: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the document of a comparison with a noise run."""
    return judged(run(reference), other, "--noise", run(reference, EPS[reference.dtype]), *options)


def judged(reference: Path, other: Path, *options: str | Path) -> tuple[int, dict[str, Any]]:
    """The exit code and the document of a comparison; limits are a guess without a noise run."""
    done = run_capd("compare", reference, other, "--logical", "--json", *options)
    assert done.code in (0, 1), done.err
    return done.code, done.json


@pytest.mark.parametrize("name", rows(LAYOUTS, ("tp2sp", f"cp2{NARROW}")))
def test_every_whole_tensor_of_a_sound_layout_is_within_its_limit(run: Runs, name: str) -> None:
    reference, sizes = LAYOUTS[name]
    layout = replace(reference, **sizes)
    code, found = compared(run, reference, run(layout))

    assert (code, found["beyond"], found["first_divergence"]) == (0, 0, None), found["tensors"][:3]
    # From the second step on, embeddings differ by rounding.
    assert found["samples"]["rule"] == ("content" if layout.steps == 1 else "nearest")
    assert (found["samples"]["pairs"], found["samples"]["unpaired"]) == (4 * layout.steps, 0)
    assert found["only_reference"] == found["only_other"] == []
    assert found["left_out"] == {}
    assert found["compared"] > 200
    assert found["gradient_scale"] == layout.dp
    if layout.pp == layout.ranks:
        assert found["bit_equal"] == found["compared"]
    if layout.experts:
        assert (found["rerouted_tokens"], found["routed_tokens"]) == (0, 64)
        assert any(".experts.3." in row["tensor"] for row in found["tensors"])

    code, guessed = judged(run(reference), run(layout))
    assert guessed["guessed_limits"] is True
    assert (code, guessed["beyond"]) == (0, 0), guessed["tensors"][:3]
    run.forget(layout)


@pytest.mark.parametrize("name", rows(BUGS, ("loss_over_cp_twice", "output_not_reduced")))
def test_a_bug_is_named_by_its_place_and_its_factor(run: Runs, name: str) -> None:
    reference, sizes, tensor, after, equals = BUGS[name]
    layout = replace(reference, **sizes, plugin=f"tests.kit.models.layout_bugs:{name.partition(',')[0]}")
    code, found = compared(run, reference, run(layout))

    first = found["first_divergence"]
    assert code == 1
    assert (first["tensor"], first["after"]) == (tensor, after), first
    assert first["inputs_agree"]
    assert first["equals"] == equals
    if equals:
        assert first["residual"] < (1e-6 if layout.dtype == "float32" else 1e-2)
    if name.startswith("weight_scaled"):
        assert first["factor"] == pytest.approx(1.05, abs=2e-3)
    # Long before it, all agrees; the layers after it do not.
    assert first["iteration"] == layout.steps - 1
    assert first["times_limit"] > (10 if layout.dtype == "float32" else 1)

    if layout.steps == 1:
        guessed = judged(run(reference), run(layout))[1]["first_divergence"]
        assert (guessed["tensor"], guessed["equals"]) == (tensor, equals)
    run.forget(layout)


def test_a_factor_is_forgiven_up_to_scale(run: Runs) -> None:
    """The text tells the factor, and gradients that are wrong by it alone are within their limits."""
    reference, sizes, *_ = BUGS["loss_over_cp_twice"]
    other = run(replace(reference, **sizes, plugin="tests.kit.models.layout_bugs:loss_over_cp_twice"))
    told = run_capd(
        "compare",
        run(reference),
        other,
        "--logical",
        "--noise",
        run(reference, EPS["float32"]),
        "--first-divergence",
    )
    assert told.code == 1
    assert "first divergence: iteration 0, micro-batch 0: output_layer.backward.grad_output" in told.out
    assert "× 0.500 (residual 0" in told.out
    assert "equals 1/cp_size" in told.out
    assert compared(run, reference, other, "--up-to-scale")[0] == 0


def test_missing_parts_are_an_error_that_names_their_rank(run: Runs, tmp_path: Path) -> None:
    reference, sizes = LAYOUTS["tp2sp"]
    place = tmp_path / "copy.zarr"
    shutil.copytree(run(replace(reference, **sizes)), place)
    removed = run_capd("rm", place, "--series", "*rank1*linear_fc2*", "--yes")
    assert removed.code == 0, removed.err
    done = run_capd("compare", run(reference), place, "--logical", "--noise", run(reference, EPS["float32"]))
    assert done.code == 2
    assert "1 of 2 parts are missing: tp 1 (rank 1 on node " in done.err
