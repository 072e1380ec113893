"""What `offer` takes: every dtype and layout bit for bit, everything else as a counted drop with its reason."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capd_client.arena.host_copy import order_of
from capd_client.errors import ConfigError
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.key import MAX_NAME_CHARS, Key, Moment
from capd_client.protocol.messages import MAX_METADATA_NBYTES
from capd_client.session.session import Session
from capd_client.tensors import emulation_label
from tests.kit.client.offering import KEY, Counting, offer
from tests.kit.client.peer import Peer


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in C order, independent of capd."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@pytest.fixture
def session(peer: Peer, make_session: Callable[..., Session]) -> Iterator[Session]:
    session = make_session(strict=True, arena_bytes=16 << 20)
    yield session
    session.flush(10)
    now = session.snapshot()
    assert now.offered == now.committed + sum(now.dropped.values())
    assert now.in_flight == 0


def random_bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).to(torch.bool)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


@pytest.mark.parametrize("name", sorted(ITEM_NBYTES))
def test_every_dtype_arrives_bit_for_bit_in_every_layout(name: str, session: Session, peer: Peer) -> None:
    dtype = getattr(torch, name)
    matrix = random_bits(dtype, 60).view(5, 12)
    tensors = [
        matrix,
        matrix[2, 3],  # 0-d, at an offset
        matrix[:0],
        matrix[1:4],
        matrix.t(),
        matrix[::2, 1::3],
        matrix[0].expand(3, 12),
        random_bits(dtype, 1 << 18),
    ]
    for tensor in tensors:
        offer(session, tensor)
    assert session.flush(10)

    assert len(peer.records) == len(tensors)
    for record, tensor in zip(peer.records, tensors, strict=True):
        assert record.dtype == name
        assert record.descriptor.shape == tuple(tensor.shape)
        # C order of raw bytes: strided views of one-byte dtypes are made contiguous as uint8
        reference = tensor.view(torch.uint8) if dtype.itemsize == 1 and dtype is not torch.bool else tensor
        assert record.data == bits(reference)


def heads(tokens: int, width: int) -> torch.Tensor:
    """[batch, head, token, channel] as attention gets it: a view of what a Linear has made."""
    made = torch.randn(2, tokens, width, generator=torch.Generator().manual_seed(3))
    return made.unflatten(-1, (4, -1)).transpose(1, 2)


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (heads(5, 16), (0, 2, 1, 3)),
        (heads(300, 256), (0, 2, 1, 3)),
        (heads(1, 16), None),  # in C order as it is
        (torch.arange(24).view(2, 3, 4).permute(2, 0, 1), (1, 2, 0)),
        (torch.arange(24).view(2, 3, 4)[1].t(), (1, 0)),
        (torch.arange(24).view(4, 6)[:, :3].t(), None),  # gaps
        (torch.arange(4).expand(3, 4).t(), None),
        (heads(5, 16)[:, :, ::2], None),
        (heads(1500, 256), (0, 2, 1, 3)),  # 3 MiB
    ],
)
def test_what_lies_without_gaps_is_moved_as_it_lies(
    tensor: torch.Tensor, order: tuple[int, ...] | None, session: Session, peer: Peer
) -> None:
    for _ in range(2):  # the second one takes the short way
        offer(session, tensor)
    assert session.flush(10)

    assert peer.data_of("x") == [bits(tensor)] * 2
    assert [record.descriptor.order for record in peer.records] == [order] * 2


@given(shape=st.lists(st.integers(1, 4), max_size=5), data=st.data())
def test_axes_are_found_as_they_lie(shape: list[int], data: st.DataObject) -> None:
    axes = data.draw(st.permutations(range(len(shape))))
    made = torch.arange(math.prod(shape)).view(shape).permute(axes)

    order = order_of(made.shape, made.stride())

    assert order is not None
    assert made.permute(order).is_contiguous()


def test_special_values_keep_their_bits(session: Session, peer: Peer) -> None:
    values = torch.tensor([0x7FC00001, 0xFFC00000 - (1 << 32), 0x7F800000, -(1 << 31), 1], dtype=torch.int32)
    offer(session, values.view(torch.float32))
    assert session.flush(10)
    assert peer.data_of("x") == [bits(values)]


def test_a_cast_is_recorded_in_the_dtype_it_was_cast_to(session: Session, peer: Peer) -> None:
    tensor = torch.randn(33, 7, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        offer(session, tensor, cast_to=torch.bfloat16, attributes={"cast_from": "float32"})
    assert session.flush(10)
    assert peer.data_of("x") == [bits(tensor.to(torch.bfloat16))] * 2
    assert peer.records[0].dtype == "bfloat16"
    assert peer.records[0].attributes == {"cast_from": "float32", "emulation": "none"}
    assert {record.descriptor.key_id for record in peer.records} == {0}


def test_a_cast_of_what_is_not_kept_is_a_counted_drop_also_where_the_key_is_known(session: Session) -> None:
    for tensor in (torch.ones(3), torch.ones(3, dtype=torch.complex64)):
        offer(session, tensor, cast_to=torch.float32)
    assert session.snapshot().dropped == {DropReason.UNSUPPORTED.value: 1}


def test_attributes_are_told_apart_by_what_they_hold(session: Session, peer: Peer) -> None:
    first, second = {"layout": "bhsd"}, {"layout": "bshd"}
    for attributes in (first, first, second, first, None, dict(second), second, second):
        offer(session, torch.ones(3).t(), attributes=attributes)
    assert session.flush(10)
    found = [record.attributes.get("layout") for record in peer.records]
    assert found == ["bhsd", "bhsd", "bshd", "bhsd", None, "bshd", "bshd", "bshd"]
    assert len({record.descriptor.key_id for record in peer.records}) == 3


def test_the_copy_is_taken_at_once(session: Session, peer: Peer) -> None:
    for count in (10, 100_000, 3_000_000):
        tensor = torch.ones(count)
        offer(session, tensor)
        tensor.zero_()
    assert session.flush(10)
    assert peer.data_of("x") == [bits(torch.ones(count)) for count in (10, 100_000, 3_000_000)]


def test_what_is_told_about_a_tensor(session: Session, peer: Peer) -> None:
    leaf = torch.nn.Parameter(torch.ones(2, 3))
    offer(session, leaf, metadata='{"a":1}')
    offer(session, leaf * 2)
    offer(session, torch.ones(()))
    assert session.flush(10)
    first, second, third = [record.descriptor for record in peer.records]
    assert (first.requires_grad, first.is_leaf, first.device, first.metadata) == (
        True,
        True,
        "cpu",
        b'{"a":1}',
    )
    assert (second.requires_grad, second.is_leaf) == (True, False)
    assert (third.shape, third.nbytes, third.requires_grad) == ((), 4, False)


class Shouting(torch.Tensor):
    """A plain subclass, as datasets and libraries make them."""


def freed(step: int = 1) -> torch.Tensor:
    tensor = torch.ones(1000)
    view = tensor[10::step]
    tensor.untyped_storage().resize_(0)
    return view


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.ones(3, dtype=torch.complex64), "complex64"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "complex64"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch._nested_tensor_from_mask(torch.ones(1, 2, 3), torch.ones(1, 2).bool()), "nested"),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (freed, "freed"),
        (lambda: freed(2), "freed"),
        (lambda: torch.ones((1,) * 17), "17 dimensions"),
    ],
)
def test_what_capd_does_not_keep_is_dropped_with_its_reason(
    make: Callable[[], torch.Tensor], said: str, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    offer(session, torch.ones(3))  # the key is known by then, so the short way is taken too
    offer(session, make())
    assert session.snapshot().dropped == {DropReason.UNSUPPORTED.value: 1}
    assert said in caplog.text


def test_tensors_inside_a_function_transform_are_dropped(session: Session) -> None:
    def look(x: torch.Tensor) -> torch.Tensor:
        offer(session, x)
        return x.sum()

    offer(session, torch.ones(3))  # the key is known by then, so the short way is taken too
    for _ in range(2):
        torch.func.grad(look)(torch.ones(3))
    assert session.snapshot().dropped == {DropReason.UNSUPPORTED.value: 2}


def test_a_plain_subclass_and_negative_views_are_captured(session: Session, peer: Peer) -> None:
    offer(session, torch.ones(3).as_subclass(Shouting))
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert conjugate.is_neg()
    offer(session, conjugate)
    offer(session, torch._neg_view(torch.ones(2)))  # contiguous
    assert session.flush(10)
    assert peer.data_of("x") == [
        bits(torch.ones(3)),
        bits(torch.tensor([-2.0, 4.0])),
        bits(torch.tensor([-1.0, -1.0])),
    ]


def test_a_dtensor_gives_its_local_shard(session: Session, peer: Peer) -> None:
    from torch import distributed
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        offer(session, DTensor.from_local(torch.arange(6.0), mesh, [Replicate()]))
    finally:
        distributed.destroy_process_group()
    assert session.flush(10)
    assert peer.data_of("x") == [bits(torch.arange(6.0))]


def test_too_large_names_the_setting(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    offer(session, torch.zeros(17 << 20, dtype=torch.uint8))
    assert session.snapshot().dropped == {DropReason.TOO_LARGE.value: 1}
    assert "CAPD_ARENA_BYTES" in caplog.text


def test_beyond_the_budget_of_a_step_captures_are_dropped_with_the_setting_to_raise(
    peer: Peer, make_session: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    session = make_session(strict=True, arena_bytes=16 << 20, max_mb_per_step=0.001)
    for iteration in (0, 0, 0, 1):
        session.offer(torch.zeros(100), KEY, Moment(iteration))

    assert session.snapshot().offered == 4
    assert session.snapshot().dropped == {DropReason.STEP_BUDGET.value: 1}
    assert "CAPD_MAX_MB_PER_STEP" in caplog.text


@pytest.mark.parametrize(
    "key",
    [
        Key(quant_type="q", rank=0, tensor_name="x" * (MAX_NAME_CHARS + 1)),
        Key(quant_type="q", rank=0, tensor_name="\ud800"),
        Key(quant_type="q", rank=0, tensor_name=3),  # type: ignore[arg-type]
        Key(quant_type="q", rank=0, tensor_name="x", layer=-1),
        Key(quant_type="q", rank=0, tensor_name="x", layer=[1]),  # type: ignore[arg-type]
    ],
)
def test_a_key_outside_the_limits_is_a_counted_drop(key: Key, session: Session) -> None:
    offer(session, torch.ones(3), key)
    offer(session, torch.ones(3))
    now = session.snapshot()
    assert now.offered == 2
    assert now.dropped == {DropReason.INVALID_KEY.value: 1}


def test_attributes_and_metadata_outside_the_limits_are_counted_drops(session: Session) -> None:
    for attributes in (
        {"a": object()}, {"a": "x" * (65 << 10)}, {3: 4}, {"a": b"raw"}, {"a": float("nan")}, {"a": [float("inf")]},
    ):  # fmt: skip
        offer(session, torch.ones(3), attributes=attributes)
    for metadata in ("x" * (MAX_METADATA_NBYTES + 1), "é" * (MAX_METADATA_NBYTES // 2 + 1), "\ud800"):
        offer(session, torch.ones(3), metadata=metadata)
    offer(session, torch.ones(3), metadata="é" * (MAX_METADATA_NBYTES // 2))
    assert session.snapshot().dropped == {DropReason.INVALID_KEY.value: 9}


def test_modes_of_the_job_do_not_see_our_operations(session: Session, peer: Peer) -> None:
    tensors = [torch.ones(3), torch.ones(4, 6).t(), torch.ones(5 << 18, dtype=torch.uint8)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Counting() as mode, torch.device("meta"):
            for tensor in tensors:
                offer(session, tensor)
                offer(session, tensor, cast_to=torch.float64)
        assert mode.seen == []
    finally:
        torch.set_num_threads(threads)
    assert session.flush(10)
    assert len(peer.records) == 6


def test_captures_leave_autograd_and_every_random_generator_alone(session: Session) -> None:
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    leaf = torch.ones(300, 300, requires_grad=True)
    product = (leaf * 3).t()
    for _ in range(20):
        offer(session, product)
        offer(session, leaf)
    product.sum().backward()

    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full((300, 300), 3.0))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def broken(*_: Any) -> None:
    raise RuntimeError("a fault")


def test_an_error_inside_capd_is_counted_and_not_raised(
    peer: Peer, make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session()
    monkeypatch.setattr("capd_client.staging.stager.move_holding_gil", broken)
    offer(session, torch.ones(3))
    offer(session, torch.ones(3))  # the short way
    monkeypatch.setattr("capd_client.arena.host_copy.move", broken)
    offer(session, torch.ones(3), metadata="{}")
    monkeypatch.setattr("capd_client.staging.describe.problem_of", broken)
    offer(session, torch.ones(3).t())
    offer(session, torch.ones(2, 3).t())
    offer(session, object())
    now = session.snapshot()
    assert now.offered == 6
    assert now.in_flight + now.committed + sum(now.dropped.values()) == 6
    assert now.dropped["internal"] >= 3
    assert now.dropped["unsupported"] == 1
    wait = session.flush(10)
    assert wait
    assert session.queue.slots.take(session.queue.slots.capacity) is not None, "no slot was lost"


def test_strict_raises_what_is_otherwise_counted(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capd_client.staging.describe.problem_of", broken)
    with pytest.raises(RuntimeError, match="a fault"):
        offer(session, torch.ones(2, 3).t())
    assert session.snapshot().dropped == {DropReason.INTERNAL.value: 1}


def test_an_interrupt_in_the_middle_of_a_copy_loses_no_slot(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    offer(session, torch.ones(3))
    with monkeypatch.context() as patch:
        patch.setattr("capd_client.staging.stager.move_holding_gil", interrupted)
        with pytest.raises(KeyboardInterrupt):
            offer(session, torch.ones(3))
    assert session.flush(10)
    now = session.snapshot()
    assert (now.offered, now.committed, now.in_flight) == (2, 1, 0)
    assert now.dropped == {DropReason.INTERRUPTED.value: 1}


def test_a_moment_is_checked_before_it_is_sent() -> None:
    from capd_client.steps.context import Context

    with pytest.raises(ConfigError):
        Context(environ={}).set_moment(iteration=2**63)


@pytest.mark.parametrize(("mode", "payload"), [("tensor", True), ("stats", False)])
def test_mode_stats_sends_the_bytes_and_asks_for_statistics_alone(
    mode: str, payload: bool, peer: Peer, make_session: Callable[..., Session]
) -> None:
    session = make_session(strict=True, arena_bytes=16 << 20, mode=mode)
    offered = [torch.arange(6.0).view(2, 3), torch.ones(4, 2).t(), torch.zeros(0, 3), torch.ones(600_000)]
    for tensor in (*offered, offered[0]):  # the last one takes the short way
        offer(session, tensor)
    offer(session, offered[0], metadata='{"a": 1}')

    assert session.flush(10)
    assert [record.descriptor.payload for record in peer.records] == [payload] * 6
    assert [record.descriptor.row_offset for record in peer.records] == [None] * 6
    assert [record.data for record in peer.records[:4]] == [bits(tensor) for tensor in offered]
    assert [record.descriptor.shape for record in peer.records[:4]] == [tuple(t.shape) for t in offered]


def test_what_belongs_to_no_module_says_the_emulation_of_its_time(session: Session, peer: Peer) -> None:
    tensor, model = torch.ones(2), torch.nn.Linear(2, 2)
    offer(session, tensor)
    end = emulation_label.begin([model], '{"linear":"mxfp8"}')
    offer(session, tensor)
    offer(session, tensor, attributes={"layout": "x"})
    end()
    offer(session, tensor)
    assert session.flush(10)

    assert [record.attributes for record in peer.records] == [
        {"emulation": "none"},
        {"emulation": '{"linear":"mxfp8"}'},
        {"emulation": '{"linear":"mxfp8"}', "layout": "x"},
        {"emulation": "none"},
    ]
