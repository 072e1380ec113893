"""Nothing that tensor_saver's calls are given raises into the job, or costs another tensor."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import capd_client
from capd_client import tensor_saver
from capd_client.protocol.reference import parse_reference
from capd_client.tensor_saver import TensorSaver, get_tensor_saver, save_tensor
from capd_client.tensor_saver import state as saver_state
from tests.kit.client.peer import Peer
from tests.kit.client.saver_calls import TENSOR, one, save

pytestmark = pytest.mark.usefixtures("untold")


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


class Broken:
    """Nothing can be asked of it, not even what it is."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError

    def __repr__(self) -> str:
        raise RuntimeError


def freed() -> torch.Tensor:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(0)
    return tensor


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return TENSOR * 2


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


class Subclass(torch.Tensor):
    pass


KEPT: dict[str, Callable[[], Any]] = {
    "with a gradient": lambda: TENSOR.clone().requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(TENSOR),
    "inference": inference,
    "subclass": lambda: TENSOR.as_subclass(Subclass),
    "transposed": TENSOR.t,
    "expanded": lambda: torch.ones(1).expand(3, 3),
    "scalar": lambda: torch.tensor(1.0),
    "empty": lambda: torch.empty(0, 3),
    "fp8": lambda: TENSOR.to(torch.float8_e4m3fn),
    "a negated view": lambda: torch.complex(TENSOR, TENSOR).conj().imag,
}
NOT_KEPT: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a list": lambda: [TENSOR, TENSOR],
    "an array": TENSOR.numpy,
    "no object at all": Broken,
    "sparse": TENSOR.to_sparse,
    "meta": lambda: TENSOR.to("meta"),
    "complex": lambda: torch.complex(TENSOR, TENSOR),
    "fake": fake,
    "freed": freed,
}


@pytest.mark.parametrize("make", [*KEPT.values(), *NOT_KEPT.values()], ids=[*KEPT, *NOT_KEPT])
def test_whatever_stands_in_a_tensors_place_is_a_record_or_none(on: Peer, make: Callable[[], Any]) -> None:
    value = make()
    reference = save_tensor(value, "linear", "forward", "bf16", "x")
    assert (reference is None) == (make not in KEPT.values())

    assert save() is not None  # the next one is captured in any case
    assert capd_client.flush(10)
    counters = capd_client.counters()
    assert (counters["offered"], counters["in_flight"]) == (2, 0)
    if reference is not None:
        (data,) = on.data_of("x")
        assert data == value.detach().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", ["rank", "sample_idx", "metadata", "layer_idx", "quant_type"])
def test_an_argument_that_cannot_even_be_asked_raises_nothing(on: Peer, name: str) -> None:
    arguments: dict[str, Any] = {"quant_type": "bf16", name: Broken()}

    assert set(tensor_saver.save_linear_tensors(TENSOR, TENSOR, **arguments)) == {"input", "weight"}
    assert set(tensor_saver.save_attention_tensors(TENSOR, None, None, **arguments)) == {"query"}  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, -1, "3", 1.5, 2**70, [1], Broken], ids=range(7))
def test_whatever_the_state_is_set_to_the_next_source_counts(on: Peer, value: Any) -> None:
    value = Broken() if value is Broken else value
    state = tensor_saver.get_tensor_collection_state()
    attributes = ("current_rank", "current_sample_idx", "current_iteration", "batch_idx", "sequence_idx")
    for name in attributes:
        setattr(state, name, value)

    assert save() is not None
    assert tensor_saver.get_current_rank_and_sample() == (0, 0)
    assert (state.get_iteration(), state.get_batch_idx(), state.get_sequence_idx()) == (0, 0, 0)
    record = one(on)
    moment = record.descriptor.moment
    assert (record.key.rank, moment.sample_idx, moment.iteration) == (0, 0, 0)
    assert (moment.batch_idx, moment.sequence_idx) == (0, 0)


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
    assert saver_state.sample_of(torch.ones(1, dtype=torch.int64, device="meta")) == 0
    assert not shown


def test_an_index_that_cannot_even_be_shown_raises_nothing() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    assert saver_state.sample_of(Broken()) == 0


def test_captures_of_several_threads_are_records_of_their_own(on: Peer) -> None:
    references: list[str | None] = []

    def work() -> None:
        references.extend(save(layer_idx=1) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert capd_client.flush(10)
    assert None not in references
    assert len({*references}) == len(on.records) == 200


def test_calls_in_a_backward_have_the_state_of_their_time(on: Peer) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            tensor_saver.save_linear_tensors(grads[0], TENSOR, "bf16", operation="backward")
            tensor_saver.save_attention_tensors(TENSOR, TENSOR, TENSOR, "bf16", operation="backward")
            return grads[0] * 2

    tensor_saver.initialize_tensor_collection(rank=2, sample_idx=3, iteration=4, batch_idx=5, sequence_idx=6)
    loss = Product.apply(torch.ones(3, requires_grad=True)).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()

    assert capd_client.flush(10)
    assert len(on.records) == 5
    for record in on.records:
        moment = record.descriptor.moment
        assert (record.key.rank, moment.sample_idx, moment.iteration) == (2, 3, 4)
        assert (moment.batch_idx, moment.sequence_idx) == (5, 6)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute"
)  # torch looks at it itself behind a break of the graph
def test_a_compiled_module_with_the_calls_computes_the_same_and_is_captured(on: Peer) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tensor_saver.set_global_sample_idx(7)
            state = tensor_saver.get_tensor_collection_state()
            state.batch_idx = tensor_saver.get_current_rank_and_sample()[1]
            tensor_saver.save_linear_tensors(x, self.linear.weight, "bf16", layer_idx=1, metadata={"a": True})
            y = self.linear(x)
            save_tensor(y, "linear", "forward", "bf16", "output", 1, "post", "linear")
            get_tensor_saver().save_attention_tensors(y, y, y, "bf16")
            return y.relu()

    layer = Layer()
    expected = layer(TENSOR)
    before = len(on.records) if capd_client.flush(10) else 0
    compiled = torch.compile(layer, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(TENSOR), expected)
        compiled(TENSOR).sum().backward()

    assert capd_client.flush(10)
    assert before == 6
    assert len(on.records) == 6 + 6 * 6
    moments = [record.descriptor.moment for record in on.records]
    assert {(moment.sample_idx, moment.batch_idx) for moment in moments} == {(7, 7)}


def test_the_reference_of_a_tensor_that_consists_of_others_is_the_first_ones(on: Peer) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)

    reference = save_tensor(jagged, "linear", "forward", "bf16", "x")

    assert capd_client.flush(10)
    assert reference is not None
    names = [record.key.tensor_name for record in on.records]
    assert len(names) > 1
    assert parse_reference(reference)[0]["tensor_name"] == names[0]


def test_a_log_handler_that_fails_costs_no_tensor(on: Peer, fresh: pytest.MonkeyPatch) -> None:
    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError

    fresh.setenv("CAPD_LOG", "debug")
    log, handler = logging.getLogger("capd_client"), Failing()
    log.addHandler(handler)
    try:
        assert save() is not None
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    assert one(on).key.tensor_name == "output"
