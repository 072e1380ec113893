"""`Store.logical`: which series are parts of one tensor, what it returns, and what it refuses by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capd
from capd.errors import CapdError, ConfigError, ContradictoryParts, MissingParts, NoSuchRecord
from capd.store.logical.series import LogicalSeries
from capd_client.protocol.key import Moment
from tests.kit.store.cli import StoreWriter
from tests.kit.store.parts import linear, placed, put_parts

WHOLE = np.arange(24.0, dtype=np.float32).reshape(4, 6)


def halves(placement: str = "S(0)", **changes: Any) -> list[tuple[Any, Any, dict[str, Any]]]:
    """The two rows of a tensor that two ranks hold."""
    return [
        (linear(rank=rank, **changes), WHOLE[2 * rank : 2 * rank + 2], placed("tp", placement, rank, 2))
        for rank in range(2)
    ]


def only(run: Path, **selection: Any) -> LogicalSeries:
    [found] = capd.open(run).logical(**selection)
    return found


def test_parts_of_two_ranks_are_one_tensor(tmp_path: Path) -> None:
    found = only(put_parts(tmp_path, halves(), iteration=3, time_ns=5))
    assert found.name == "layers.0.fc1.forward.output"
    assert (found.dtype, found.kept, found.coordinates) == ("float32", "tensor", {})
    assert found.moments == [Moment(iteration=3, time_ns=5)]
    assert found.shape(0) == (4, 6)
    np.testing.assert_array_equal(found.numpy(0), WHOLE)
    np.testing.assert_array_equal(found.values(Moment(iteration=3)), WHOLE)
    assert [(part.rank, part.node, part.place) for part in found.parts] == [
        (0, "node0", {"tp": 0}), (1, "node0", {"tp": 1}),
    ]  # fmt: skip
    assert found.missing == []
    assert found.spread == 0.0
    assert found.attributes == {"tp_placement": "S(0)", "tp_size": 2}
    assert found.placements == "tp S(0) of 2"


def test_a_tensor_is_found_by_the_key_of_any_part(tmp_path: Path) -> None:
    run = put_parts(tmp_path, halves())
    store = capd.open(run)
    for selection in (
        {"rank": 1},
        {"module": "*.fc1"},
        {"path": "*rank1*"},
        {"tensor_name": "output"},
        {},
    ):
        [found] = store.logical(**selection)
        np.testing.assert_array_equal(found.numpy(0), WHOLE)
    assert store.logical(rank=7) == store.logical(module="other") == []
    with pytest.raises(CapdError, match="unknown key field"):
        store.logical(colour="red")
    with pytest.raises(ConfigError, match="attempt"):
        store.logical(attempt="first")


def test_a_missing_rank_is_named_with_its_node_and_nothing_partial_is_returned(tmp_path: Path) -> None:
    other = (linear("input", rank=1), WHOLE, placed("tp", "R", 1, 2))
    put_parts(tmp_path, halves()[:1])
    run = put_parts(tmp_path, [other], node="far")
    found = only(run, tensor_name="output")
    for read in (found.numpy, found.values, found.shape, found.spread_at):
        with pytest.raises(MissingParts, match=r"1 of 2 parts are missing: tp 1 \(rank 1 on node far\)"):
            read(0)
    [missing] = found.missing
    assert (missing.place, missing.ranks) == ({"tp": 1}, ("rank 1 on node far",))


def test_a_missing_rank_without_any_record_is_known_by_its_session_or_the_size_of_the_job(
    tmp_path: Path,
) -> None:
    run = put_parts(tmp_path / "a", halves()[:1], sessions={0: 2, 1: 2}, node="n7")
    with pytest.raises(MissingParts, match=r"tp 1 \(rank 1 on node n7\)"):
        only(run).numpy(0)
    run = put_parts(tmp_path / "b", halves()[:1], sessions={0: 2})
    with pytest.raises(MissingParts, match=r"tp 1 \(rank 1\)"):
        only(run).numpy(0)
    run = put_parts(tmp_path / "c", halves()[:1])
    with pytest.raises(MissingParts, match=r"missing: tp 1; collect"):
        only(run).numpy(0)


def test_a_moment_that_one_rank_dropped_is_missing_and_the_others_are_whole(tmp_path: Path) -> None:
    put_parts(tmp_path, halves(), iteration=1)
    run = put_parts(tmp_path, halves()[1:], iteration=2)
    found = only(run)
    assert [moment.iteration for moment in found.moments] == [1, 2]
    np.testing.assert_array_equal(found.numpy(0), WHOLE)
    with pytest.raises(
        MissingParts, match=r"at iteration 2: 1 of 2 parts are missing: tp 0 \(rank 0 on node0|tp 0"
    ):
        found.numpy(1)
    assert [str(one) for one in found.missing] == ["tp 0 (rank 0 on node node0)"]
    for wrong in (2, -3, Moment(iteration=9)):
        with pytest.raises(NoSuchRecord):
            found.numpy(wrong)


def test_parts_of_several_nodes_are_joined(tmp_path: Path) -> None:
    first, second = halves()
    put_parts(tmp_path, [first], node="n0")
    found = only(put_parts(tmp_path, [second], node="n1"))
    np.testing.assert_array_equal(found.numpy(0), WHOLE)
    assert [part.node for part in found.parts] == ["n0", "n1"]


def test_bits_are_kept_and_sums_are_rounded_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 16, (2, 3, 4), dtype=np.uint16)
    bits[0, 0, 0] = 0x7FC1  # a NaN with a payload
    parts = [(linear("weight", rank=r), bits[r], placed("tp", "S(1)", r, 2)) for r in range(2)]
    found = only(put_parts(tmp_path / "a", parts))
    assert found.dtype == "bfloat16"
    np.testing.assert_array_equal(found.numpy(0), np.concatenate([bits[0], bits[1]], 1))

    terms = (rng.standard_normal((2, 3, 4)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    parts = [(linear(rank=r), terms[r], placed("tp", "P(sum)", r, 2)) for r in range(2)]
    found = only(put_parts(tmp_path / "b", parts))
    numbers = (terms.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    np.testing.assert_array_equal(found.numpy(0), numbers.sum(0).astype(np.float32))
    assert (found.dtype, found.part_dtype) == ("float32", "bfloat16")
    assert found.attributes["sum"] == "float32, added in float64 from bfloat16"


def test_replicas_are_compared(tmp_path: Path) -> None:
    parts = [(linear("weight", rank=r), WHOLE, placed("tp", "R", r, 3)) for r in range(3)]
    assert only(put_parts(tmp_path / "same", parts)).spread == 0.0
    off = WHOLE.copy()
    off[3, 5] += 0.23
    parts[2] = (*parts[2][:1], off, *parts[2][2:])
    found = only(put_parts(tmp_path / "off", parts))
    assert found.spread == pytest.approx(0.01, rel=1e-5)
    np.testing.assert_array_equal(found.numpy(0), WHOLE)
    off[0, 0] = np.nan
    assert only(put_parts(tmp_path / "nan", parts)).spread == np.inf


def test_copies_inside_a_fused_projection_are_compared(tmp_path: Path) -> None:
    """Two query heads, one group: both ranks hold the key and the value."""
    heads = {"qkv_heads": 2, "qkv_groups": 1, "qkv_head_dim": 1}
    rows = [np.array([[q], [7.0], [8.0]], dtype=np.float32) for q in (1.0, 2.0)]
    parts = [(linear("weight", rank=r), rows[r], placed("tp", "QKV(0)", r, 2, **heads)) for r in range(2)]
    found = only(put_parts(tmp_path / "same", parts))
    assert found.numpy(0).ravel().tolist() == [1.0, 2.0, 7.0, 8.0]
    assert found.spread == 0.0
    rows[1][1] = 6.0
    assert only(put_parts(tmp_path / "off", parts)).spread == pytest.approx(1 / 8, rel=0.2)


def test_ranks_with_other_samples_have_tensors_of_their_own_and_share_parameters(tmp_path: Path) -> None:
    parts = [
        (linear(name, rank=2 * dp + tp), WHOLE[2 * tp : 2 * tp + 2] + (dp if name == "output" else 0),
         {**placed("tp", "S(0)", tp, 2), "dp_rank": dp, "dp_size": 2, **more})
        for name, more in (("weight", {}), ("output", {}), ("input", {"batch_dims": ["dp"]}))
        for dp in range(2) for tp in range(2)
    ]  # fmt: skip
    store = capd.open(put_parts(tmp_path, parts))
    assert [one.name for one in store.logical()] == [
        "layers.0.fc1.forward.input[dp=0]", "layers.0.fc1.forward.input[dp=1]", "layers.0.fc1.forward.output[dp=0]",
        "layers.0.fc1.forward.output[dp=1]", "layers.0.fc1.forward.weight",
    ]  # fmt: skip
    assert [one.coordinates for one in store.logical(tensor_name="output", rank=0)] == [{"dp": 0}]
    assert [one.coordinates for one in store.logical(tensor_name="output", rank=3)] == [{"dp": 1}]
    for dp, found in enumerate(store.logical(tensor_name="output")):
        assert found.coordinates == {"dp": dp}
        np.testing.assert_array_equal(found.numpy(0), WHOLE + dp)
    assert store.logical(tensor_name="weight")[0].spread == 0.0


def test_stages_of_a_pipeline_are_united_and_experts_named_by_their_number(tmp_path: Path) -> None:
    local = "layers.{}.mlp.experts.local_experts.0.fc"
    parts = [
        (linear("weight", rank=rank, module=local.format(rank // 2), layer=rank // 2), WHOLE + rank,
         {"pp_rank": rank // 2, "pp_size": 2, "ep_rank": rank % 2, "ep_size": 2, "expert": rank % 2})
        for rank in range(4)
    ]  # fmt: skip
    store = capd.open(put_parts(tmp_path, parts))
    names = [one.name for one in store.logical()]
    assert names == [f"layers.{layer}.mlp.experts.{e}.fc.forward.weight" for layer in (0, 1) for e in (0, 1)]
    [third] = store.logical(module="layers.1.mlp.experts.0.fc")
    np.testing.assert_array_equal(third.numpy(0), WHOLE + 2)


def test_ranks_that_say_nothing_of_their_place_are_told_apart(tmp_path: Path) -> None:
    parts: list[Any] = [(linear("weight", rank=rank), WHOLE, {}) for rank in range(2)]
    assert [one.coordinates for one in capd.open(put_parts(tmp_path / "two", parts)).logical()] == [
        {"rank": 0}, {"rank": 1},
    ]  # fmt: skip
    assert only(put_parts(tmp_path / "one", parts[1:])).coordinates == {}


def with_two(tmp_path: Path, changes: dict[str, Any], array: Any = WHOLE[2:], **key: Any) -> LogicalSeries:
    first, _ = halves()
    return only(
        put_parts(
            tmp_path, [first, (linear(rank=1, **key), array, {**placed("tp", "S(0)", 1, 2), **changes})]
        )
    )


@pytest.mark.parametrize(
    ("changes", "array", "said"),
    [
        ({}, WHOLE[2:, :4], "rank1.*has length 4 along axis 1"),
        ({"tp_placement": "S(1)"}, WHOLE[2:], r"rank1.*is placed as tp S\(1\) of 2"),
        ({"tp_size": 3}, WHOLE[2:], "placed as tp"),
        ({"tp_rank": 0}, WHOLE[2:], "hold the same part"),
        ({"tp_rank": 0}, WHOLE[3:], r"has shape \[1, 6\], and .*holds the same part, \[2, 6\]"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(
    tmp_path: Path, changes: dict[str, Any], array: Any, said: str
) -> None:
    with pytest.raises((ContradictoryParts, MissingParts), match=said):
        with_two(tmp_path, changes, array).numpy(0)


def test_a_job_that_goes_on_in_another_layout_is_joined_as_each_record_says(tmp_path: Path) -> None:
    """Attempt 0 has two tensor parallel ranks. In attempt 1 they are data parallel: rank 1 has other samples."""
    writer = StoreWriter(tmp_path)
    for rank, (key, array, attributes) in enumerate(halves()):
        writer.put("run", key, array, "float32", Moment(), attributes=attributes)
        moved = {"dp_rank": rank, "dp_size": 2, "batch_dims": ["dp"], **placed("tp", "S(0)", 0, 1)}
        writer.put("run", key, array + rank, "float32", Moment(attempt=1), attributes=moved)
        weight = linear("weight", rank=rank)
        writer.put("run", weight, array, "float32", Moment(), attributes=attributes)
        writer.put("run", weight, WHOLE[:2], "float32", Moment(attempt=1), attributes=moved)
    store = capd.open(writer.close() / "run.zarr")
    [weight] = store.logical(tensor_name="weight", attempt="all")
    np.testing.assert_array_equal(weight.numpy(0), WHOLE)
    np.testing.assert_array_equal(weight.numpy(1), WHOLE[:2])
    assert weight.spread == 0.0
    [output] = store.logical(tensor_name="output", attempt="all")
    np.testing.assert_array_equal(output.numpy(0), WHOLE)
    with pytest.raises(ContradictoryParts, match=r"rank1.*its rank stood at {'dp': 1} then"):
        output.numpy(1)


def test_slices_and_parts_of_split_quantised_tensors_are_not_joined(tmp_path: Path) -> None:
    with pytest.raises(
        ContradictoryParts, match=r"rank1.*belongs to a quantised tensor that is split over ranks"
    ):
        with_two(tmp_path / "quantised", {"tensor_class": "torchao.MXTensor"}).numpy(0)
    writer = StoreWriter(tmp_path / "slice")
    for rank, (key, array, attributes) in enumerate(halves()):
        more = {"metadata": b'{"slice": {"take": "0:1", "of": [4, 6]}}'} if rank else {}
        writer.put("run", key, array, "float32", Moment(), attributes=attributes, **more)
    with pytest.raises(ContradictoryParts, match=r"rank1.*only a slice of what the rank held"):
        only(writer.close() / "run.zarr").numpy(0)


def test_an_unsound_attribute_is_refused_with_the_series_that_has_it(tmp_path: Path) -> None:
    for number, (changes, said) in enumerate(
        (({"tp_size": 10**6}, "tp_size is 1000000"), ({"tp_placement": "S(zero)"}, r"S\(zero\)"),
         ({"batch_dims": "dp"}, "batch_dims is 'dp'"), ({"batch_dims": ["dp"]}, "no dp_rank"),
         ({"expert": -1}, "expert is -1"), ({"tp_rank": "1"}, "tp_rank is '1'"))
    ):  # fmt: skip
        first, second = halves()
        run = put_parts(tmp_path / str(number), [first, (second[0], second[1], {**second[2], **changes})])
        with pytest.raises(ContradictoryParts, match=f"rank1.*{said}"):
            capd.open(run).logical()
        assert capd.open(run).logical(module="other") == []


def test_the_order_of_two_splits_of_one_axis_is_that_of_the_mesh(tmp_path: Path) -> None:
    whole = np.arange(10.0)  # tp: 5, 5; then dp: 3, 2
    parts = [
        (linear("grad_weight", rank=2 * dp + tp), whole[5 * tp : 5 * tp + 5][3 * dp : 3 * dp + 3],
         {"mesh": ["tp", "dp"], **placed("tp", "S(0)", tp, 2), **placed("dp", "S(0)", dp, 2)})
        for dp in range(2) for tp in range(2)
    ]  # fmt: skip
    np.testing.assert_array_equal(only(put_parts(tmp_path, parts)).numpy(0), whole)
