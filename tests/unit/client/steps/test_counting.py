"""Iterations and micro-batches counted from forwards and optimizer steps alone, against what the loop itself counts.

Each forward's dY is its own x (times the loss scale), so a record shows which forward it belongs to.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capd_client.config.settings import load_config
from capd_client.process.log import RateLimitedLog
from capd_client.steps import clock, gate
from capd_client.watching.watch import watch
from tests.kit.client.models import reentrant
from tests.kit.client.sink import MemorySink

At = tuple[int, int]
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")


class Job(nn.Module):
    """A model whose forward notes where its loop says it is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.at: At = (0, 0)
        self.forwards: list[tuple[At, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.forwards.append((self.at, x.detach().clone()))
        return self.fc(x)

    def loss(self, scale: float = 1.0) -> Tensor:
        """The loss of one forward on new numbers."""
        x = torch.randn(2, 4)
        return (self(x) * x * scale).sum()


@pytest.fixture(autouse=True)
def _fresh_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_notices", RateLimitedLog())
    monkeypatch.setattr(clock, "_evaluation_said", False)
    monkeypatch.setattr(gate, "_notices", RateLimitedLog())


def check(sink: MemorySink, *jobs: Job, gradients: bool = True) -> None:
    """What was captured of each job's Linear is what its forwards noted, each with its own values."""
    for number, job in enumerate(jobs):
        name = f"{number}.fc" if len(jobs) > 1 else "fc"
        expected = [((*at, 0), x) for at, x in job.forwards]
        assert [c.at for c in sink.of(name, "input")] == [at for at, _ in expected]
        assert all(
            torch.equal(c.value, x) for c, (_, x) in zip(sink.of(name, "input"), expected, strict=True)
        )
        if gradients:
            found = {c.at: c.value for c in sink.of(name, "grad_output")}
            assert found.keys() == {at for at, _ in expected}
            assert all(torch.equal(found[at], x) for at, x in expected)


def sgd(job: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(job.parameters(), lr=0.01)


def test_accumulation_with_evaluation_in_between(sink: MemorySink) -> None:
    job = Job()
    optimizer = sgd(job)
    watch(job, steps="all")

    for step in range(3):
        for micro_batch in range(step + 1):
            job.at = (step, micro_batch)
            job.loss().backward()
            job.eval()
            job.loss()  # between the micro-batches of one step
            job.train()
        optimizer.step()
        job.eval()
        with torch.no_grad():
            job.loss()
        job.train()

    check(sink, job)


def test_evaluation_in_training_mode_leaves_no_trace(
    sink: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the loop forgets eval(), or its model has none to speak of."""
    job = Job()
    optimizer = sgd(job)
    watch(job, steps="all")

    with caplog.at_level(logging.WARNING):
        for step in range(2):
            for micro_batch in range(2):
                for without in (torch.no_grad, torch.inference_mode):
                    with without():
                        job.loss()
                with torch.no_grad(), pytest.raises(RuntimeError):
                    job(torch.randn(2, 5))  # one that fails
                job.at = (step, micro_batch)
                job.loss().backward()
            optimizer.step()

    check(sink, job)
    [message] = [record.getMessage() for record in caplog.records]
    assert "forwards without gradients are taken for evaluation" in message


def test_an_evaluation_inside_a_training_forward_ends_with_it(sink: MemorySink) -> None:
    """A teacher without gradients, watched for itself, inside of the student's forward."""

    class Student(Job):
        def __init__(self, teacher: Job) -> None:
            super().__init__()
            self.teacher = [teacher]

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.teacher[0](x)
            return super().forward(x)

    teacher = Job()
    student = Student(teacher)
    watch(student, name="0", steps="all")
    watch(teacher, name="1", steps="all")

    for micro_batch in range(2):
        student.at = (0, micro_batch)
        student.loss().backward()

    check(sink, student, teacher)
    assert teacher.forwards == []


def test_a_root_whose_forward_is_checkpointed_trains(sink: MemorySink) -> None:
    """The first pass of a reentrant checkpoint is without gradients, and no evaluation."""
    job = Job()
    watch(job, steps="all")

    for micro_batch in range(2):
        x = torch.randn(2, 4, requires_grad=True)
        job.forwards.append(((0, micro_batch), x.detach().clone()))
        (reentrant(nn.Module.__call__, job, x) * x.detach()).sum().backward()

    job.forwards = [job.forwards[0], job.forwards[2]]  # its forward notes the second pass, too
    check(sink, job)


def test_gradients_of_several_forwards_in_one_backward_keep_their_own_micro_batch(sink: MemorySink) -> None:
    job = Job()
    optimizer = sgd(job)
    watch(job, steps="all")

    for step in range(2):
        losses = []
        for micro_batch in range(3):
            job.at = (step, micro_batch)
            losses.append(job.loss())
        for loss in reversed(losses):  # as a pipeline may
            loss.backward()
        optimizer.step()

    check(sink, job)


def test_an_optimizer_in_parts_ends_one_iteration(sink: MemorySink) -> None:
    job = Job()
    parts = [torch.optim.SGD([p], lr=0.01) for p in job.parameters()]
    watch(job, steps="all")

    for step in range(3):
        for micro_batch in range(2):
            job.at = (step, micro_batch)
            job.loss().backward()
        for part in parts:
            part.step()

    check(sink, job)


def test_optimizers_that_take_turns_end_an_iteration_each(sink: MemorySink) -> None:
    """As in a GAN; what the loop calls one iteration, `set_moment` says."""
    first, second = Job(), Job()
    optimizers = [sgd(first), sgd(second)]
    watch(first, name="0", steps="all")
    watch(second, name="1", steps="all")

    for step in range(2):
        for turn, (job, optimizer) in enumerate(zip((first, second), optimizers, strict=True)):
            job.at = (2 * step + turn, 0)
            job.loss().backward()
            optimizer.step()
    check(sink, first, second)

    for job in (first, second):
        job.forwards.clear()
    sink.captured.clear()
    for step in (10, 11):
        sink.context.set_moment(iteration=step)
        for turn, (job, optimizer) in enumerate(zip((first, second), optimizers, strict=True)):
            job.at = (step, turn)
            job.loss().backward()
            optimizer.step()
    check(sink, first, second)


def test_evaluations_of_a_closure_are_micro_batches_of_its_step(sink: MemorySink) -> None:
    job = Job()
    optimizer = torch.optim.LBFGS(job.parameters(), max_iter=4)
    watch(job, steps="all")
    evaluated = 0

    def closure(step: int) -> Tensor:
        nonlocal evaluated
        job.at = (step, evaluated)
        evaluated += 1
        optimizer.zero_grad()
        loss = job.loss()
        loss.backward()
        return loss

    for step in range(2):
        evaluated = 0
        optimizer.step(partial(closure, step))
        assert evaluated > 1

    check(sink, job)


def test_a_step_that_a_scaler_skips_is_a_step(sink: MemorySink) -> None:
    job = Job()
    optimizer, scaler = sgd(job), torch.amp.GradScaler("cpu", init_scale=1.0)
    watch(job, steps="all")
    weight = job.fc.weight.detach().clone()

    for step in range(4):
        for micro_batch in range(2):
            job.at = (step, micro_batch)
            scaler.scale(job.loss(scale=float("inf") if step == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(job.fc.weight, weight) == (step == 0)

    check(sink, job, gradients=False)


def test_steps_without_forward_and_forwards_without_step(sink: MemorySink) -> None:
    """An iteration is a step that had a forward; forwards wait for their step, however many there are."""
    job = Job()
    optimizer = sgd(job)
    watch(job, steps="all")

    for micro_batch in range(3):
        job.at = (0, micro_batch)
        job.loss().backward()
    optimizer.step()
    optimizer.step()
    job.at = (1, 0)
    job.loss().backward()

    check(sink, job)


@pytest.mark.parametrize("variable", ["CAPD_ITERATION", "TENSOR_SAVER_ITERATION"])
def test_counting_starts_where_the_settings_say(sink: MemorySink, variable: str) -> None:
    config = load_config({variable: "1000"})
    sink.begin_at(iteration=config.iteration)
    job = Job()
    optimizer = sgd(job)
    watch(job, steps="1001-1002")

    for step in range(1000, 1004):
        job.at = (step, 0)
        loss = job.loss()
        if step not in (1001, 1002):
            job.forwards.pop()
        loss.backward()
        optimizer.step()

    check(sink, job)


def test_counting_goes_on_from_a_moment_that_was_set_and_handed_back(sink: MemorySink) -> None:
    job = Job()
    optimizer = sgd(job)
    watch(job, steps="all")
    sink.context.set_moment(iteration=500)
    sink.context.set_moment(iteration=None)

    for step in (500, 501):
        for micro_batch in range(2):
            job.at = (step, micro_batch)
            job.loss().backward()
        optimizer.step()

    check(sink, job)


def test_steps_that_lie_before_the_first_iteration_are_said_once(
    sink: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    sink.begin_at(iteration=1000)
    job = Job()
    optimizer = sgd(job)
    watch(job, steps="0")

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            job.loss().backward()
            optimizer.step()

    assert sink.captured == []
    [message] = [record.getMessage() for record in caplog.records]
    assert 'the job is at iteration 1000, and steps "0" are before it' in message
    assert "CAPD_STEPS=1000" in message


def test_nothing_is_said_when_the_chosen_steps_are_over_or_still_to_come(
    sink: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    job, other = Job(), Job()
    optimizer = sgd(job)
    watch(job, steps="0")
    watch(other, name="later", steps="100-")

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            (job.loss() + other.loss()).backward()
            optimizer.step()

    assert caplog.records == []


def _in_backward(job: Job) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, job.parameters(), {"lr": 0.01})


def _after_accumulation(job: Job) -> None:
    for parameter in job.parameters():
        own = torch.optim.SGD([parameter], lr=0.01)

        def step(parameter: Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("fuse", [_in_backward, _after_accumulation])
def test_optimizers_that_step_inside_the_backward(sink: MemorySink, fuse: Any) -> None:
    job = Job()
    fuse(job)
    watch(job, steps="all")

    for step in range(3):
        job.at = (step, 0)
        before = job.fc.weight.detach().clone()
        job.loss().backward()
        assert not torch.equal(job.fc.weight, before)

    check(sink, job)


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_an_optimizer_over_shards_ends_one_iteration(sink: MemorySink) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    job = Job()
    watch(job, steps="all")
    wrapped = nn.parallel.DistributedDataParallel(job)
    optimizer = ZeroRedundancyOptimizer(job.parameters(), torch.optim.Adam, lr=0.01)

    with wrapped.join():
        for step in range(3):
            for micro_batch in range(2):
                job.at = (step, micro_batch)
                x = torch.randn(2, 4)
                (wrapped(x) * x).sum().backward()
            optimizer.step()

    check(sink, job)


def test_a_compiled_optimizer_counts(sink: MemorySink, forget_graphs: None) -> None:
    job = Job()
    optimizer = torch.optim.SGD(job.parameters(), lr=torch.tensor(0.01))
    watch(job, steps="all")
    step_once = torch.compile(optimizer.step, backend="eager")

    for step in range(3):
        job.at = (step, 0)
        job.loss().backward()
        step_once()

    check(sink, job)


def _train_without_optimizer(job: Job, micro_batches: Iterable[int]) -> None:
    for micro_batch in micro_batches:
        job.at = (0, micro_batch)
        job.loss().backward()
        with torch.no_grad():
            for parameter in job.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None


def test_where_nothing_steps_that_torch_knows_a_chosen_step_ends_and_that_is_said(
    sink: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    watch(job, steps="0-2,100-:100")

    with caplog.at_level(logging.WARNING):
        _train_without_optimizer(job, range(300))
    [message] = [record.getMessage() for record in caplog.records]
    assert "256 forwards and no step of a torch.optim.Optimizer" in message
    assert len(sink.of("fc", "input")) == len(sink.of("fc", "grad_output")) == 256

    del job.forwards[256:]
    sgd(job).step()
    job.at = (1, 0)
    job.loss().backward()
    check(sink, job)
    sink.context.set_moment(iteration=100)
    job.loss().backward()
    assert [one.at for one in sink.of("fc", "input")[256:]] == [(1, 0, 0), (100, 0, 0)]


def test_an_iteration_that_the_job_sets_or_one_of_all_steps_has_no_end(
    sink: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    handle = watch(job, steps="all")
    _train_without_optimizer(job, range(300))
    assert len(sink.of("fc", "input")) == 300
    handle.remove()

    caplog.clear()
    watch(job, steps="7")
    sink.context.set_moment(iteration=7)
    _train_without_optimizer(job, range(300))
    assert len(sink.of("fc", "input")) == 600
    assert not caplog.records
