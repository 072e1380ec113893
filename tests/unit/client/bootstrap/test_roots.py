"""Which modules are taken for what a job trains, when the search ends, and that torch is then as it was."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer


class Found(NamedTuple):
    """What was handed over to be watched."""

    model: nn.Module
    called: nn.Module
    name: str


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Found]]:
    """A search that has begun, in a process that has not imported capd_client; `search.answer` is what `watch` says."""
    import _capd_roots

    watches: list[Found] = []
    stand_in = types.ModuleType("capd_client.watching.automatic")

    def watch_found(model: nn.Module, *, called: nn.Module, name: str) -> str:
        watches.append(Found(model, called, name))
        has_linear = any(isinstance(module, nn.Linear) for module in model.modules())
        return "watched" if has_linear else "empty"

    stand_in.watch_found = watch_found  # type: ignore[attr-defined]
    stand_in.emulate_found = lambda model: watch_found(model, called=model, name="emulated")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "capd_client.watching.automatic", stand_in)
    monkeypatch.delitem(sys.modules, "capd_client", raising=False)
    hooks = dict(torch_optimizer._global_optimizer_post_hooks)
    original = torch.compile
    search = _capd_roots._Search()
    search.begin()
    yield watches
    search.end()
    torch_optimizer._global_optimizer_post_hooks.clear()
    torch_optimizer._global_optimizer_post_hooks.update(hooks)
    assert not torch_module._global_forward_pre_hooks
    assert torch.compile is original
    torch._dynamo.reset()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


class Net(nn.Module):
    """Of a job's own file: what lies in torch's own is never compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def x() -> Tensor:
    return torch.ones(3, 4)


def searching() -> bool:
    return bool(torch_module._global_forward_pre_hooks)


def train(call: Any, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        call(x()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_first_training_forward_is_the_models(found: list[Found]) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    train(model, optimizer)
    assert found == [(model, model, "")]
    assert searching()
    train(model, optimizer, steps=3)

    assert found == [(model, model, "")]
    assert not searching()


def test_a_wrapper_that_is_called_is_the_root(found: list[Found]) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    wrapper = Wrapper(mlp())
    wrapper(x())

    assert found == [(wrapper, wrapper, "")]


def test_what_does_not_train_is_no_root(found: list[Found]) -> None:
    teacher, frozen, evaluated, meta = mlp(), mlp().requires_grad_(False), mlp().eval(), mlp().to("meta")
    with torch.no_grad():
        teacher(x())
    with torch.inference_mode():
        teacher(x())
    frozen(x())
    frozen.requires_grad_(False)(x())
    evaluated(x())
    meta(torch.ones(3, 4, device="meta"))
    nn.MSELoss()(torch.ones(2, requires_grad=True), torch.ones(2))
    assert found == []

    model = mlp()
    model(frozen(x()).repeat(1, 2))

    assert [watch.model for watch in found] == [model]


def test_a_forward_inside_a_backward_is_a_recompute(found: list[Found]) -> None:
    hidden, leaf = mlp(), torch.ones(1, requires_grad=True)
    ran = []

    def again(gradient: Tensor) -> None:
        with torch.enable_grad():
            ran.append(hidden(x()).requires_grad)

    product = leaf * 2
    product.register_hook(again)
    product.backward()

    assert ran == [True]
    assert found == []


def test_models_that_take_turns_are_all_found_and_told_apart(found: list[Found]) -> None:
    discriminator, generator, late = mlp(), mlp(), mlp()
    of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
    for _ in range(2):
        train(discriminator, of_discriminator)
        train(generator, of_generator)
    late(x())

    assert found == [
        (discriminator, discriminator, "discriminator"),
        (generator, generator, "generator"),
    ]


def test_models_are_named_after_what_their_caller_calls_them(found: list[Found]) -> None:
    actor, critic = mlp(), mlp()
    nets = types.SimpleNamespace(actor=actor, value=[mlp(), mlp()])
    nets.actor(x())
    critic(x())
    for net in nets.value:
        net(x())

    assert [watch.name for watch in found] == ["", "critic", "net", "net#1"]
    assert actor is found[0].model


@pytest.mark.parametrize("turn", [1, -1])
def test_models_that_train_side_by_side_have_the_same_names_whichever_runs_first(
    found: list[Found], turn: int
) -> None:
    actor, critic, teacher = mlp(), mlp(), mlp()
    averaged = torch.optim.swa_utils.AveragedModel(actor)
    optimizers = {"all": torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1)}
    pair = [actor, critic][::turn]
    for net in pair:
        net(x())

    assert {watch.name: watch.model for watch in found} == {"actor": actor, "critic": critic}
    del averaged, teacher, optimizers


def test_the_only_model_that_trains_needs_no_name(found: list[Found]) -> None:
    """Though others are at hand: an average of it, a teacher that nobody froze."""
    model, teacher = mlp(), mlp()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    model(x())

    assert found == [(model, model, "")]
    del averaged, teacher, optimizer


def test_names_that_say_nothing_are_left_off(found: list[Found]) -> None:
    first = mlp()
    first(x())
    module = torch.optim.swa_utils.AveragedModel(Net())
    module(x())

    assert [watch.name for watch in found] == ["", "Net"]


@pytest.mark.parametrize("raises", [False, True])
def test_the_forward_that_initialises_lazy_modules_is_no_training(found: list[Found], raises: bool) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    if raises:
        with pytest.raises(TypeError):
            model(x(), x())
    model(x())
    assert found == []

    model(x())
    assert found == [(model, model, "")]


def test_a_forward_that_is_counted_or_faked_is_no_training(found: list[Found]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    model = mlp()
    with FlopCounterMode(display=False):
        model(x()).sum().backward()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(x())
    assert found == []

    model(x())
    assert found == [(model, model, "")]


def test_a_method_of_a_larger_model_that_calls_its_parts_makes_it_the_model(found: list[Found]) -> None:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = mlp(), mlp()

        def act(this, observation: Tensor) -> Tensor:
            return this.actor(observation) + this.critic(observation)

    agent = Agent()
    agent.act(x())

    assert found == [(agent, agent.actor, "")]


def test_models_with_nothing_to_watch_do_not_end_the_search(found: list[Found]) -> None:
    temperature, model = nn.PReLU(), mlp()
    temperature(x())
    model(x())

    assert [watch.model for watch in found] == [temperature, model]
    assert found[1].name == ""


def test_an_optimizer_that_steps_before_anything_trains_only_makes_its_state(found: list[Found]) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    optimizer.step()

    train(model, optimizer)

    assert len(found) == 1


@pytest.mark.parametrize(
    ("own", "environ"),
    [
        pytest.param(True, {"CAPD_EMULATE": "mxfp8"}, id="it imports capd_client"),
        pytest.param(False, {"CAPD_EMULATE": "mxfp8", "CAPD_WATCH": "off"}, id="nothing is to be watched"),
    ],
)
def test_models_that_are_not_to_be_watched_are_found_to_be_emulated(
    own: bool, environ: dict[str, str], found: list[Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if own:
        monkeypatch.setitem(sys.modules, "capd_client", types.ModuleType("capd_client"))
    actor, critic = mlp(), mlp()

    for model in (actor, critic, actor):
        model(x())
    assert found == [(actor, actor, "emulated"), (critic, critic, "emulated")]


@pytest.mark.parametrize("home", ["torch.cuda.graphs", "transformer_engine.pytorch.graph"])
def test_a_part_that_is_warmed_up_for_a_cuda_graph_is_no_root(
    found: list[Found], home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library: dict[str, Any] = {"__name__": home}
    exec("def make_graphed_callables(part, x):\n    return part(x)", library)  # noqa: S102
    graphed, emulated = Net(), Net()

    library["make_graphed_callables"](graphed.up, x())
    graphed(x())
    monkeypatch.setenv("CAPD_EMULATE", "mxfp8")  # what a graph computes is settled when it is recorded
    library["make_graphed_callables"](emulated, x())

    assert [watch.model for watch in found] == [graphed, emulated]


def test_a_job_that_imports_capd_client_is_left_alone(
    found: list[Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "capd_client", types.ModuleType("capd_client"))

    mlp()(x())

    assert found == []
    assert not searching()


def test_a_search_without_end_ends(found: list[Found], monkeypatch: pytest.MonkeyPatch) -> None:
    import _capd_roots

    monkeypatch.setattr(_capd_roots, "_MAX_CALLS", 5)
    model = mlp()
    for _ in range(3):
        model(x())

    assert not searching()


def test_what_a_watch_raises_ends_the_search_and_not_the_job(
    found: list[Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["capd_client.watching.automatic"], "watch_found", None)

    assert mlp()(x()).shape == (3, 2)
    assert not searching()


def test_what_the_forward_raises_is_the_jobs(found: list[Found]) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        mlp()(torch.ones(3, 5))

    assert len(found) == 1


def test_hooks_put_on_the_model_while_it_is_called_run_in_that_call(
    found: list[Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def watch_found(model: nn.Module, **_: Any) -> str:
        model.register_forward_pre_hook(lambda *_: ran.append("plain"))
        model.register_forward_pre_hook(lambda m, args, kw: ran.append("kw"), with_kwargs=True)
        model.register_forward_pre_hook(lambda m, args, kw: ((args[0] * 2,), kw), with_kwargs=True)
        model.register_forward_hook(lambda *_: ran.append("post"))
        return "watched"

    monkeypatch.setattr(sys.modules["capd_client.watching.automatic"], "watch_found", watch_found)
    model = nn.Linear(4, 2)

    output = model(x())

    assert ran == ["plain", "kw", "post"]
    assert torch.equal(output, nn.functional.linear(2 * x(), model.weight, model.bias))


def compiled_frames(run: Any) -> int:
    """How many graphs are compiled while `run` runs."""
    counter = torch._dynamo.testing.CompileCounter()
    run(counter)
    return counter.frame_count


def test_compiled_models_are_looked_at_before_they_run_and_compiled_once(found: list[Found]) -> None:
    model = Net()

    def run(backend: Any) -> None:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        train(compiled, torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
        assert [watch.called for watch in found] == [compiled]

    assert compiled_frames(run) == 1
    assert not searching()


def test_a_model_compiled_in_place_is_looked_at_and_compiled_once(found: list[Found]) -> None:
    model = Net()

    def run(backend: Any) -> None:
        model.compile(backend=backend, fullgraph=True)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=4)

    assert compiled_frames(run) == 1
    assert found == [(model, model, "")]


def test_compiled_parts_of_a_model_are_compiled_once(found: list[Found]) -> None:
    model = nn.Sequential(Net(), nn.Linear(2, 2))

    def run(backend: Any) -> None:
        model[0].compile(backend=backend, fullgraph=True)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=4)

    assert compiled_frames(run) == 1
    assert found == [(model, model, "")]


def test_of_a_compiled_function_its_models_are_looked_at(found: list[Found]) -> None:
    model, other = Net(), Net()

    def run(backend: Any) -> None:
        @torch.compile(backend=backend, fullgraph=True)
        def loss(given: nn.Module, x: Tensor) -> Tensor:
            return given(x) + model(x)

        train(lambda x: loss(other, x), torch.optim.SGD(model.parameters(), lr=0.1), steps=4)

    assert compiled_frames(run) == 1
    assert {watch.model for watch in found} == {model, other}


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method:DeprecationWarning"
)  # torch's own, of its compiler
def test_a_compiled_optimizer_is_compiled_once_and_its_steps_count(found: list[Found]) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(backend: Any) -> None:
        step = torch.compile(optimizer.step, backend=backend)
        for _ in range(4):
            model(x()).sum().backward()
            step()

    frames = compiled_frames(run)
    assert not searching()
    torch._dynamo.reset()
    assert compiled_frames(run) == frames  # as without a search


def test_what_torch_compile_returns_is_what_it_would_be(found: list[Found]) -> None:
    from torch._dynamo.eval_frame import OptimizedModule, innermost_fn

    def double(x: Tensor) -> Tensor:
        return 2 * x

    model = Net()
    compiled = torch.compile(double, backend="eager")

    assert isinstance(torch.compile(model, backend="eager"), OptimizedModule)
    assert (compiled.__name__, innermost_fn(compiled)) == ("double", double)
    assert torch.equal(compiled(x()), 2 * x())
    assert torch.equal(
        torch.compile(lambda x: compiled(x) + 1, backend="eager", fullgraph=True)(x()), 2 * x() + 1
    )
    assert searching()
