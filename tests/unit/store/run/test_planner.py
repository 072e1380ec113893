"""Which series records of one key share."""

from __future__ import annotations

from capd.store.run.options import StoreOptions
from capd.store.run.planner import Planner
from capd_client.protocol.key import Key

KEY = Key(quant_type="bf16", rank=0, tensor_name="x")


def test_shapes_long_along_different_axes_do_not_grow_into_one_that_nothing_can_hold() -> None:
    planner = Planner(StoreOptions(), [])
    plans = [planner.plan(KEY, "uint8", {}, shape, b"") for shape in [(150_000, 2), (0, 2**40), (150_000, 2)]]
    assert plans[0] is plans[2]
    assert max(plan.geometry.shard_slots for plan in plans) <= 2**20


def test_a_shape_that_grows_a_little_takes_what_came_before_along() -> None:
    planner = Planner(StoreOptions(), [])
    planner.plan(KEY, "uint8", {}, (1000, 2), b"")
    grown = planner.plan(KEY, "uint8", {}, (10, 3), b"")
    assert grown.geometry.fits((1000, 3))
