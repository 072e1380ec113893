"""Nothing that the predecessor's calls are given raises into the job, or costs another tensor."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from client_peer import Peer

import capd_client
from capd_client import collection_state, tensor_saver
from capd_client.tensor_saver import TensorSaver, get_tensor_saver, save_tensor

TENSOR = torch.arange(6.0).view(2, 3)
pytestmark = pytest.mark.usefixtures("untold")


def one(on: Peer) -> Any:
    assert capd_client.flush(10)
    (record,) = on.records
    return record


def save(**arguments: Any) -> str | None:
    return save_tensor(TENSOR, "linear", "forward", "mxfp8", "output", **arguments)


def test_off_every_call_returns_none_and_makes_nothing(fresh: pytest.MonkeyPatch, tmp_path: Any) -> None:
    fresh.chdir(tmp_path)

    assert save() is None
    assert tensor_saver.save_linear_tensors(TENSOR, TENSOR, "bf16") == {"input": None, "weight": None}
    assert (get_tensor_saver().enabled, tensor_saver.should_collect_tensor()) == (False, False)
    assert list(tmp_path.iterdir()) == []


def test_a_saver_that_is_not_enabled_captures_nothing_where_capture_is_on(on: Peer) -> None:
    assert TensorSaver(enabled=False).save_tensor(TENSOR, "linear", "forward", "bf16", "x") is None
    assert TensorSaver("elsewhere").save_tensor(TENSOR, "linear", "forward", "bf16", "x") is not None
    assert one(on).key.tensor_name == "x"


@pytest.mark.parametrize(
    "arguments",
    [
        (None, "linear", "forward", "bf16", "x"),
        ("text", "linear", "forward", "bf16", "x"),
        (TENSOR, 3, "forward", "bf16", "x"),
        (TENSOR, [], "forward", "bf16", "x"),
        (TENSOR, "linear", "forward", "bf16", "x", -1),
        (TENSOR, "linear", "forward", "bf16", "x", "zero"),
        (TENSOR, "linear", "forward", 8, "x"),
        (TENSOR, "linear", "forward", "bf16", "x" * 5000),
        (TENSOR, "linear", "forward", "bf16", "x", 0, "pre", "linear", 2**40),
        (TENSOR.to_sparse(), "linear", "forward", "bf16", "x"),
    ],
    ids=range(10),
)
def test_what_cannot_be_captured_is_a_counted_drop_and_none(on: Peer, arguments: tuple[Any, ...]) -> None:
    assert save_tensor(*arguments) is None

    assert capd_client.flush(10)
    counters = capd_client.counters()
    assert (counters["offered"], counters["committed"], sum(counters["dropped"].values())) == (1, 0, 1)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"dtype": torch.bfloat16, "size": torch.Size([2]), "t": TENSOR, 3: None},
         b'{"dtype":"torch.bfloat16","size":[2],"t":"tensor (2, 3)","3":null}'),
        ({...}, b'{"metadata":"{Ellipsis}"}'),
        ({}, b""),
        ({"big": "x" * 5000}, b""),
        ({"bad": "\ud800"}, b""),
    ],
    ids=["other types", "no mapping", "empty", "large", "no text"],
)  # fmt: skip
def test_metadata_never_costs_the_tensor(on: Peer, metadata: Any, expected: bytes) -> None:
    assert save(metadata=metadata) is not None

    assert one(on).descriptor.metadata == expected


def test_a_dropped_tensor_returns_none(on: Peer, fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("CAPD_ARENA_BYTES", str(1 << 16))

    assert save_tensor(torch.ones(1 << 20), "linear", "forward", "bf16", "x") is None
    assert sum(capd_client.counters()["dropped"].values()) == 1


def test_at_debug_there_is_one_line_for_each_capture(
    on: Peer, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.setenv("CAPD_LOG", "debug")
    fresh.setenv("LOCAL_RANK", "1")
    tensor_saver.set_global_sample_idx(4)
    save(layer_idx=2)
    logging.getLogger("capd_client").setLevel(logging.NOTSET)

    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert lines == [
        "capd: output: rank 1 (env LOCAL_RANK), sample 4, iteration 0, layer linear 2, operation forward, phase unknown"
    ]


def test_a_recomputed_segment_is_captured_once(on: Peer) -> None:
    weight = torch.ones(3, requires_grad=True)

    def segment(x: torch.Tensor) -> torch.Tensor:
        save_tensor(x, "linear", "forward", "bf16", "x")
        return (x * weight).sum()

    get_tensor_saver()
    from torch.utils.checkpoint import checkpoint

    checkpoint(segment, torch.ones(3, requires_grad=True), use_reentrant=True).backward()

    assert one(on).key.tensor_name == "x"


def test_a_tensor_given_as_an_index_is_not_shown_as_that_would_wait_for_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[object] = []
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda tensor, **_: shown.append(tensor) or "a tensor")
    assert collection_state.sample_of(torch.ones(1, dtype=torch.int64, device="meta")) == 0
    assert not shown


def test_an_index_that_cannot_even_be_shown_raises_nothing() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    assert collection_state.sample_of(Broken()) == 0
