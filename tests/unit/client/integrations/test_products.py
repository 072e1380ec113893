"""Products that are not nn.Linear's: in nn.MultiheadAttention, Conv1D's, those of a forward or weight of their own."""

from __future__ import annotations

import copy
import functools
import io
import logging
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import scaled_dot_product_attention as attend_early

from capd_client.graph import owners
from capd_client.integrations.callers import calls
from capd_client.process.log import RateLimitedLog
from capd_client.protocol.selection import TENSORS
from capd_client.watching import attach
from capd_client.watching.watch import watch
from tests.kit.client.compiled_models import COMPILING, taken
from tests.kit.client.models import reentrant
from tests.kit.client.sink import MemorySink
from tests.kit.tiers import rows

WIDTH = 4

lazy = ModuleType("lazy")


class Conv1D(nn.Module):
    """As transformers has it: nothing of that library is imported to know it."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH))
        self.bias = nn.Parameter(torch.randn(2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Scaling(nn.Linear):
    """A forward that computes the weight of its product."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2, self.bias)


class Doubling(nn.Linear):
    """A forward around that of nn.Linear."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Renamed(nn.Linear):
    """A subclass that keeps nn.Linear's forward."""


class Apart(nn.Linear):
    """A forward whose product is none of F.linear's."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class Holder(nn.Linear):
    """A Linear with another one inside: F.linear in its forward is not only its own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inner(x), self.weight)


class Drifting(nn.Module):
    """A parametrisation that gives two weights in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.times += 1
        return weight * (1 + self.times % 2)


class Early(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return attend_early(x, x, x)


class Everything(nn.Module):
    """One of each that is tapped by more than hooks on a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.scaling = Scaling(WIDTH, WIDTH)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.early = Early()
        self.wide = Conv1D()

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.wide(self.early(self.normed(self.scaling(x)))).square().sum()


def test_which_products_a_model_has_and_which_of_its_linears_are_left_out(
    sink: MemorySink, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "_notices", RateLimitedLog())
    caplog.set_level(logging.INFO)
    model = nn.ModuleDict(
        {
            "plain": nn.Linear(4, 4),
            "renamed": Renamed(4, 4),
            "doubling": Doubling(4, 4),
            "scaling": Scaling(4, 4),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "wide": Conv1D(),
            "apart": Apart(4, 4),
            "holder": Holder(),
            "early": Early(),
            "attention": nn.MultiheadAttention(4, 2, kdim=3),
            "bilinear": nn.Bilinear(4, 4, 4),
            "embedding": nn.Embedding(4, 4),
            "convolution": nn.Conv2d(4, 4, 1),
        }
    )

    handle = watch(model)

    linears = ("plain", "renamed", "doubling", "scaling", "normed", "wide", "holder.inner")
    inside = [f"attention.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")]
    assert sorted(handle.modules) == sorted((*linears, "early", "attention", *inside))
    assert "ways of their own: apart (Apart), holder (Holder)" in caplog.text


class Twice(nn.Module):
    """One packed attention, called twice with query, key and value of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        first, second = self.attention(x, y, z)[0], self.attention(y, z, x)[0]
        return first.square().sum() + second.square().sum()


def test_the_parts_of_a_packed_weight_have_a_gradient_for_each_call(sink: MemorySink) -> None:
    model = Twice()
    watch(model, tensors=["input", "grad_output", "grad_weight"])

    model(*torch.randn(3, 5, 2, WIDTH)).backward()

    for part in ("q", "k", "v"):
        module = f"attention.in_proj_{part}"
        for call in range(2):
            at = (0, 0, call)
            rows, gradient = (sink.one(module, name, at).flatten(0, 1) for name in ("input", "grad_output"))
            torch.testing.assert_close(sink.one(module, "grad_weight", at), gradient.T @ rows)
    assert len(sink.of("attention.out_proj", "grad_weight")) == 1  # of both calls: its weight is not split


def test_the_product_is_what_torch_computed_not_what_the_module_made_of_it(sink: MemorySink) -> None:
    model = nn.Sequential(Doubling(WIDTH, WIDTH), Scaling(WIDTH, WIDTH))
    watch(model, tensors=TENSORS)
    x = torch.randn(3, WIDTH)

    y = model(x)
    y.sum().backward()

    assert torch.equal(sink.one("0", "output") * 2, sink.one("1", "input"))
    assert torch.equal(sink.one("1", "weight"), model[1].weight * 2)
    dy, dw = sink.one("1", "grad_output"), sink.one("1", "grad_weight")
    assert torch.equal(dw, dy.t() @ sink.one("1", "input"))
    assert torch.equal(model[1].weight.grad, 2 * dw)
    assert torch.equal(sink.one("1", "grad_input"), dy @ sink.one("1", "weight"))


@pytest.mark.parametrize("wrap", [lambda f, x: f(x), reentrant])
def test_a_weight_that_is_computed_belongs_to_its_call(sink: MemorySink, wrap: Callable[..., Any]) -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.utils.parametrize.register_parametrization(model, "weight", Drifting(), unsafe=True)
    root = nn.ModuleList([model])
    root.forward = lambda x: wrap(lambda y: model(torch.tanh(model(y))), x)  # type: ignore[method-assign]
    watch(root, tensors=TENSORS)

    root(torch.randn(3, WIDTH, requires_grad=True)).sum().backward()

    weights = [sink.one("0", "weight", (0, 0, call)) for call in (0, 1)]
    assert not torch.equal(*weights)
    for call, weight in enumerate(weights):
        x, y = (sink.one("0", name, (0, 0, call)) for name in ("input", "output"))
        dy, dx, dw = (sink.one("0", f"grad_{n}", (0, 0, call)) for n in ("output", "input", "weight"))
        assert torch.equal(y, F.linear(x, weight))
        assert torch.equal(dw, dy.t() @ x)
        assert torch.equal(dx, dy @ weight)


def numbers(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The loss and all gradients of one step."""
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_watched_model_computes_the_same_bits(sink: MemorySink) -> None:
    model, x = Everything(), torch.randn(2, 3, WIDTH)
    without = numbers(copy.deepcopy(model), x)

    handle = watch(model, tensors=TENSORS, steps="all")

    assert same(numbers(model, x), without)
    assert set(sink.names()) == set(TENSORS) - {"offsets"}  # those of experts
    handle.remove()
    sink.captured.clear()
    assert same(numbers(model, x), without)
    assert sink.captured == []


def copies(model: nn.Module) -> dict[str, nn.Module]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),  # noqa: S301
        "saved whole": torch.load(file, weights_only=False),
        "of every module, as DataParallel makes them": replica(model),
    }


def replica(model: nn.Module) -> nn.Module:
    """What torch.nn.parallel.replicate makes of a model: shallow copies of its modules."""
    made = model._replicate_for_data_parallel()
    for name, child in model._modules.items():
        made._modules[name] = replica(child)
    for name, parameter in model._parameters.items():
        made._parameters[name] = parameter
    return made


class Copied(Everything):
    """Without the parametrised one: torch itself refuses to pickle those."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.Identity()


def test_copies_of_every_kind_compute_the_same_and_are_not_captured(
    sink: MemorySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ModuleType(Conv1D.__module__)
    library.Conv1D = Conv1D  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, Conv1D.__module__, library)  # where pickle finds it
    model, x = Copied(), torch.randn(2, 3, WIDTH)
    watch(model, steps="all")
    expected = numbers(model, x)

    for kind, twin in copies(model).items():
        sink.captured.clear()
        hooks_of_ours = [m for m in twin.modules() if m._forward_hooks or m._forward_pre_hooks]
        assert bool(hooks_of_ours) == ("DataParallel" in kind)  # those are made without asking the module
        assert list(twin.state_dict()) == list(model.state_dict()), kind
        assert torch.equal(twin(x), expected[0]), kind
        assert sink.captured == [], kind


def test_a_watched_model_is_saved_as_it_is_unwatched(sink: MemorySink) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    called: list[int] = []
    watched = io.BytesIO()
    watch(model)
    torch.save(model, watched)

    assert b"capd" not in watched.getvalue()
    watched.seek(0)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.ReLU]):
        loaded = torch.load(watched)  # as torch does by itself, weights_only
    assert torch.equal(loaded[0].weight, model[0].weight)
    for number in range(20):  # none of the numbers of capd's hooks is taken for a new one's
        loaded[0].register_forward_hook(lambda module, args, output, n=number: called.append(n))
    loaded(torch.ones(2))
    assert called == list(range(20))


def test_what_hooks_the_job_has_are_saved_with_the_model(sink: MemorySink) -> None:
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(noted, with_kwargs=True)
    watch(model)

    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        assert list(twin._forward_pre_hooks.values()) == [noted]
        assert list(twin._forward_pre_hooks_with_kwargs) == list(twin._forward_pre_hooks)
        assert not twin._forward_hooks


def noted(*_: Any) -> None:
    """A hook of the job."""


def transforms(model: nn.Module, x: Tensor) -> dict[str, Any]:
    parameters = dict(model.named_parameters())
    call = functools.partial(torch.func.functional_call, model)
    return {
        "functional_call": lambda: call(parameters, (x,)),
        "grad": lambda: torch.func.grad(call)(parameters, (x,))["scaling.weight"],
        "vmap": lambda: torch.func.vmap(lambda one: call(parameters, (one[None],)))(x),
        "trace": lambda: torch.jit.trace(model, (x,), check_trace=False)(x),
        "fx": lambda: torch.fx.symbolic_trace(model.scaling)(x),
        "checkpoint": lambda: reentrant(model, x.clone().requires_grad_()),
        "no gradients": lambda: torch.no_grad()(model)(x),
        "inference": lambda: torch.inference_mode()(model)(x).clone(),
        "evaluation": lambda: copy.deepcopy(model).eval()(x),
    }


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python:torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", list(transforms(Everything(), torch.zeros(1, 1, WIDTH))))
def test_what_else_is_done_with_a_model_gives_what_it_gives_unwatched(sink: MemorySink, name: str) -> None:
    model, x = Everything(), torch.randn(2, 3, WIDTH)
    expected = transforms(copy.deepcopy(model), x)[name]()

    watch(model, tensors=TENSORS, steps="all")

    assert torch.equal(transforms(model, x)[name](), expected)


class Blocks(nn.Module):
    """Attention as torch has it, once for itself and once beside another."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.memory = nn.MultiheadAttention(WIDTH, 2, batch_first=True, kdim=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.packed(x, x, x, need_weights=False)[0]
        return self.memory(x, x * 2, x, need_weights=False)[0].square().sum()


@pytest.mark.usefixtures("forget_graphs")
class TestCompiled:
    pytestmark = COMPILING

    @pytest.mark.parametrize("distributed", rows([False, True], [True]))
    def test_multihead_attention_in_a_graph_is_captured_as_outside_of_it(
        self, sink: MemorySink, distributed: bool
    ) -> None:
        model, x = Blocks(), torch.randn(2, 3, WIDTH)
        handle = watch(model, tensors=TENSORS)
        model(x).backward()
        handle.remove()
        eager = {(c.key.module, c.key.layer_type, c.key.tensor_name): c.value for c in taken(sink)}

        watch(model, tensors=TENSORS)
        if distributed:  # torch makes the tables of what it compiles anew
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            torch.distributed.destroy_process_group()
        torch.compile(model, backend="aot_eager", fullgraph=True)(x).backward()

        found = {(c.key.module, c.key.layer_type, c.key.tensor_name): c.value for c in sink.captured}
        assert found.keys() == eager.keys()
        assert {name: torch.equal(value, eager[name]) for name, value in found.items()} == dict.fromkeys(
            eager, True
        )

    @pytest.mark.parametrize(
        ("select", "said"),
        [(None, 1), pytest.param({"components": ["linear"]}, 0, marks=pytest.mark.slow)],
    )
    def test_attention_that_a_graph_does_not_show_is_said_to_be_missing(
        self, sink: MemorySink, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
        select: dict[str, Any] | None, said: int,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(owners, "_notices", RateLimitedLog())
        attention, x = nn.MultiheadAttention(WIDTH, 2), torch.randn(3, 2, WIDTH)
        model = nn.ModuleList([attention, nn.MultiheadAttention(WIDTH, 2)])
        model.forward = lambda x: model[1](*(model[0](x, x, x)[0],) * 3)[0]  # type: ignore[method-assign]
        watch(model, select=select)

        torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum().backward()

        assert caplog.text.count("returns its weights") == said
        assert {c.key.module for c in sink.captured} == {
            f"{n}.{part}" for n in "01" for part in ("in_proj", "out_proj")
        }

    @pytest.mark.slow
    def test_a_weight_that_changes_its_module_when_it_is_read_is_not_read(self, sink: MemorySink) -> None:
        def trained(model: nn.Module) -> list[Tensor]:
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            return [compiled(torch.ones(2, 8)).detach().clone() for _ in range(3)]

        model = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        with torch.no_grad():
            model.parametrizations.weight[0]._v.copy_(torch.nn.functional.normalize(torch.ones(8), dim=0))
        unwatched = trained(copy.deepcopy(model))
        watch(model, tensors=TENSORS)

        assert same(trained(model), unwatched)
        assert not torch.equal(unwatched[0], unwatched[1])
        assert sink.names()["weight"] == 3

    def test_a_gradient_of_a_weight_that_is_computed_in_a_graph_belongs_to_its_call(
        self, sink: MemorySink
    ) -> None:
        model = nn.Sequential(Scaling(WIDTH, WIDTH, bias=False), Doubling(WIDTH, WIDTH, bias=False))
        model.append(model[0])
        watch(model, tensors=TENSORS)

        torch.compile(model, backend="aot_eager", fullgraph=True)(
            torch.randn(2, WIDTH)
        ).square().sum().backward()

        for module, call in (("0", 0), ("1", 0), ("0", 1)):
            at = (0, 0, call)
            expected = sink.one(module, "grad_output", at).t() @ sink.one(module, "input", at)
            assert torch.equal(sink.one(module, "grad_weight", at), expected)

    def test_a_computed_weight_in_a_graph_puts_nothing_beside_other_linears(self, sink: MemorySink) -> None:
        model = nn.Sequential(Scaling(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        taps: list[int] = []

        def count(graph: torch.fx.GraphModule, _: Any) -> Any:
            taps.append(graph.code.count("capd.tap"))
            return make_boxed_func(graph.forward)

        watch(model)
        compiled = torch.compile(model, backend=aot_autograd(fw_compiler=count), fullgraph=True)
        compiled(torch.randn(2, WIDTH)).sum().backward()

        assert sink.names() == dict.fromkeys(("input", "weight", "output", "grad_output"), 2)
        assert torch.equal(sink.one("0", "weight"), model[0].weight * 2)
        assert taps[0] == 2


class Asking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return lazy.function(x)


def test_looking_for_callers_asks_no_module_for_what_it_has_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(lazy, "__getattr__", asked.append, raising=False)

    assert not calls(Asking, "scaled_dot_product_attention")
    assert asked == []
