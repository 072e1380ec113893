"""Slices: strict in what they read, and the bytes they keep against numpy's own indexing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from capd_client.errors import ConfigError
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import MAX_METADATA_NBYTES
from capd_client.rules.slices import ACTIVATIONS, Slice, parse_slices
from capd_client.session.session import Session
from tests.kit.client.peer import Peer

KEY = Key(quant_type="q", rank=0, tensor_name="x")


@pytest.mark.parametrize(
    "text",
    [
        "", "first", "first:", "first:0", "first:-1", "first:1.5", "first:1,2", "first: 1", "first:1@", "first:1@x",
        "first:1@100", "first:1000000000001", "first:99999999999999999999", "first:\u0663", "last:3", "stride:0",
        "stride:a", "stride:2@1@1", "tokens:5", "tokens:-5", "tokens:5-", "tokens:5-4", "tokens:0-1000000000001",
        "tokens:0:9", "0:64", "rows:0-3", "first:1\nfirst:2",
    ],
)  # fmt: skip
def test_what_is_no_slice_is_refused_with_the_three_forms_or_the_limit(text: str) -> None:
    with pytest.raises(ConfigError, match=r"first:64|not between|last token"):
        Slice(text)


@pytest.mark.parametrize("value", [5, None, b"first:1", ["first:1"]])
def test_what_is_no_text_is_no_slice(value: Any) -> None:
    with pytest.raises(ConfigError):
        Slice(value)


@pytest.mark.parametrize(
    ("text", "shape", "kept"),
    [
        ("first:2", (5, 3), (2, 3)),
        ("first:9", (5, 3), (5, 3)),
        (" First:2@-1 ", (5, 3), (5, 2)),
        ("first:1000000000000", (5,), (5,)),
        ("stride:2", (5, 3), (3, 3)),
        ("stride:1000000000000@1", (5, 3), (5, 1)),
        ("tokens:1-2", (5, 3), (2, 3)),
        ("tokens:1-2", (5,), (2,)),
        ("tokens:1-2", (4, 6, 7), (4, 2, 7)),
        ("tokens:1-2", (3, 4, 6, 7), (3, 4, 2, 7)),
        ("tokens:1-2@0", (4, 6, 7), (2, 6, 7)),
        ("tokens:4-100", (5, 3), (1, 3)),
        ("tokens:5-100", (5, 3), (0, 3)),
        ("first:1@2", (5, 3), (5, 3)),
        ("first:1@-3", (5, 3), (5, 3)),
        ("first:1", (), ()),
        ("tokens:0-0", (), ()),
        ("stride:2", (0, 3), (0, 3)),
    ],
)
def test_axis_and_rows_are_those_of_the_documentation(
    text: str, shape: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    tensor = torch.zeros(shape)
    cut, _ = Slice(text).apply(tensor, "")

    assert Slice(text).shape_of(shape) == tuple(cut.shape) == kept
    assert cut.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()  # a view


numbers = st.integers(1, 7)
shapes = st.lists(st.integers(0, 6), min_size=0, max_size=4).map(tuple)


@given(st.sampled_from(["first", "stride"]), numbers, st.integers(-5, 4), shapes)
def test_rows_and_strides_keep_what_numpy_keeps(
    kind: str, number: int, axis: int, shape: tuple[int, ...]
) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape)
    cut, metadata = Slice(f"{kind}:{number}@{axis}").apply(torch.from_numpy(array), "")

    if not -len(shape) <= axis < len(shape):
        assert (tuple(cut.shape), metadata) == (shape, "")
        return
    indices = range(min(number, shape[axis])) if kind == "first" else range(0, shape[axis], number)
    expected = np.take(array, list(indices), axis=axis)
    assert np.array_equal(cut.numpy(), expected)
    assert Slice(f"{kind}:{number}@{axis}").shape_of(shape) == expected.shape
    assert json.loads(metadata) == {"slice": {"take": f"{kind}:{number}@{axis}", "of": list(shape)}}


@given(st.integers(0, 6), st.integers(0, 6), shapes.filter(len))
def test_token_ranges_keep_both_ends(first: int, more: int, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape)
    cut, _ = Slice(f"tokens:{first}-{first + more}").apply(torch.from_numpy(array), "")

    axis = len(shape) - 2 if len(shape) >= 3 else 0
    indices = [row for row in range(shape[axis]) if first <= row <= first + more]
    assert np.array_equal(cut.numpy(), np.take(array, indices, axis=axis))


def test_a_plain_text_is_for_activations_and_names_for_what_they_name() -> None:
    assert set(parse_slices("first:3")) == set(ACTIVATIONS)
    assert {"weight", "grad_weight"}.isdisjoint(ACTIVATIONS)
    named = parse_slices({"input": "first:3", "weight": "stride:8"})
    assert {name: take.text for name, take in named.items()} == {"input": "first:3", "weight": "stride:8"}
    assert parse_slices({}) == {}


# -- through the stager ------------------------------------------------------------------------------------


@pytest.fixture
def session(peer: Peer, make_session: Callable[..., Session]) -> Iterator[Session]:
    session = make_session(strict=True, arena_bytes=16 << 20)
    yield session
    assert session.flush(10)
    now = session.snapshot()
    assert (now.offered, now.in_flight) == (now.committed + sum(now.dropped.values()), 0)


def bits(tensor: torch.Tensor) -> bytes:
    """C order, independent of capd."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def take(session: Session, tensor: torch.Tensor, text: str, **options: Any) -> None:
    session.offer(tensor, KEY, Moment(), take=Slice(text), **options)


@pytest.mark.parametrize("name", sorted(ITEM_NBYTES))
def test_every_dtype_arrives_bit_for_bit_from_every_layout(name: str, session: Session, peer: Peer) -> None:
    dtype = getattr(torch, name)
    raw = torch.arange(24 * 20 * dtype.itemsize, dtype=torch.int64).remainder(251).to(torch.uint8)
    matrix = (raw.remainder(2) if dtype is torch.bool else raw).view(dtype).view(24, 20)
    plain = (
        matrix.view(torch.uint8)
        if dtype.itemsize == 1
        else matrix.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    )
    cuts: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = [
        ("first:3", lambda m: m, plain[:3]),
        ("stride:7", lambda m: m, plain[::7]),
        ("first:4@1", lambda m: m.t(), plain.t()[:, :4]),
        ("stride:3@-1", lambda m: m[2:9], plain[2:9, ::3]),
        ("tokens:5-6", lambda m: m.view(4, 6, 20), plain.view(4, 6, 20)[:, 5:7]),
        ("tokens:30-31", lambda m: m, plain[:0]),
    ]
    for text, layout, _ in cuts:
        take(session, layout(matrix), text)
    assert session.flush(10)

    for record, (text, layout, expected) in zip(peer.records, cuts, strict=True):
        assert (record.dtype, record.descriptor.shape) == (name, tuple(expected.shape)), text
        assert record.data == bits(expected), text
        said = {"take": text, "of": list(layout(matrix).shape)}
        assert json.loads(record.descriptor.metadata) == {"slice": said}


def test_large_slices_and_casts_and_the_copy_at_once(session: Session, peer: Peer) -> None:
    tensor = torch.randn(3000, 700, generator=torch.Generator().manual_seed(2))
    expected = [bits(tensor[:1000]), bits(tensor[::2].to(torch.bfloat16))]
    take(session, tensor, "first:1000")
    take(session, tensor, "stride:2", cast_to=torch.bfloat16, attributes={"cast_from": "float32"})
    tensor.zero_()
    assert session.flush(10)

    assert peer.data_of("x") == expected


def test_what_a_record_says_is_of_the_tensor_that_was_offered(session: Session, peer: Peer) -> None:
    weight = torch.nn.Parameter(torch.ones(6, 2))
    take(session, weight, "first:2", metadata='{"a":[1],"b":"\u00e4"}')
    with torch.inference_mode():
        take(session, torch.ones(3, 2), "first:1")
    assert session.flush(10)

    first = peer.records[0].descriptor
    assert (first.requires_grad, first.is_leaf, first.shape) == (True, True, (2, 2))
    assert json.loads(first.metadata) == {
        "a": [1], "b": "\u00e4", "slice": {"take": "first:2", "of": [6, 2]},
    }  # fmt: skip
    assert peer.records[1].descriptor.shape == (1, 2)


def test_where_there_is_no_such_axis_the_whole_tensor_is_kept_and_nothing_said(
    session: Session, peer: Peer
) -> None:
    take(session, torch.ones(()), "first:1")
    take(session, torch.ones(4), "first:1@1", metadata='{"slice":"mine"}')
    assert session.flush(10)

    found = [(record.descriptor.shape, record.descriptor.metadata) for record in peer.records]
    assert found == [((), b""), ((4,), b'{"slice":"mine"}')]


def test_metadata_that_does_not_go_with_a_slice_is_a_counted_drop(
    session: Session, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    long = json.dumps({"a": "x" * (MAX_METADATA_NBYTES - 20)})
    session.offer(torch.ones(4), KEY, Moment(), metadata=long)
    take(session, torch.ones(4), "first:1", metadata=long)
    take(session, torch.ones(4), "first:1", metadata='{"slice":1}')
    assert session.flush(10)

    assert session.snapshot().dropped == {"invalid_key": 2}
    assert len(peer.records) == 1
    assert str(MAX_METADATA_NBYTES) in caplog.text


def test_a_slice_of_what_is_too_large_or_over_the_budget_fits(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    session = make_session(strict=True, max_mb_per_step=0.01)
    tensor = torch.zeros(1 << 12, 1 << 8)  # 4 MiB, the arena has one
    take(session, tensor, "first:5")
    take(session, tensor, "first:5")
    assert session.flush(10)

    assert session.snapshot().dropped == {"step_budget": 1}
    assert len(peer.data_of("x")[0]) == 5 * 4 * 256


def test_cutting_leaves_autograd_and_the_jobs_modes_alone(session: Session) -> None:
    class Watching(TorchDispatchMode):
        seen: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(6, 3, requires_grad=True)
    y = x * 2
    version, node = y._version, y.grad_fn
    with Watching():
        take(session, y, "stride:2@1")
    y.sum().backward()

    assert Watching.seen == []
    assert (y._version, y.grad_fn) == (version, node)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((6, 3), 2.0))


def test_of_a_sharded_tensor_the_local_shard_is_cut(session: Session, peer: Peer) -> None:
    class DTensor(torch.Tensor):
        """Eight rows on four ranks; any operation on it would start a collective."""

        placements = ("S(0)",)

        @property
        def device_mesh(self) -> Any:
            return Mesh()

        _local_tensor = torch.arange(6.0).view(2, 3)

        def to_local(self) -> torch.Tensor:
            return self._local_tensor

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "getitem" not in str(func), func
            return super().__torch_function__(func, types, args, kwargs or {})

    class Mesh:
        mesh_dim_names, ndim, shape = ("dp",), 1, (4,)

        def _get_root_mesh(self) -> Any:
            return self

        def get_coordinate(self) -> list[int]:
            return [0]

    take(session, torch.zeros(8, 3).as_subclass(DTensor), "first:1")
    assert session.flush(10)

    assert peer.data_of("x") == [bits(torch.arange(3.0))]
    assert json.loads(peer.records[0].descriptor.metadata)["slice"]["of"] == [2, 3]


def test_a_slice_left_out_counts_the_bytes_of_the_slice(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    session = make_session(strict=True, mode="sample:1/2")
    session.offer(torch.zeros(50, 2), KEY, Moment(1), take=Slice("first:3"))
    session.close(10)

    assert [row.nbytes for row in peer.drops.values()] == [24]
