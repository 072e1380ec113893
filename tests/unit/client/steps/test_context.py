"""Rank and moment: the order of sources, and how the count moves on by itself or by hand."""

from __future__ import annotations

import logging

import pytest
import torch

from capd_client.errors import ConfigError
from capd_client.process import ranks
from capd_client.process.log import INTERVAL_S, RateLimitedLog
from capd_client.process.ranks import find_rank
from capd_client.steps.context import Context


def at(context: Context) -> tuple[int, int]:
    moment = context.moment()
    return moment.iteration, moment.micro_batch


def test_forwards_count_micro_batches_and_an_optimizer_step_begins_an_iteration() -> None:
    context = Context(environ={})
    seen = []
    for _ in range(3):
        for _ in range(2):
            context.begin_micro_batch()
            seen.append(at(context))
        context.optimizer_stepped()
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_tap_outside_a_root_begins_the_iteration_and_not_a_second_micro_batch() -> None:
    context = Context(environ={})
    context.begin_micro_batch()
    context.optimizer_stepped()
    context.optimizer_stepped()

    context.begin_if_dirty()
    assert at(context) == (1, 0)
    context.begin_if_dirty()
    context.begin_micro_batch()
    assert at(context) == (1, 0)
    context.begin_micro_batch()
    assert at(context) == (1, 1)


def test_a_set_iteration_wins_and_restarts_the_micro_batches() -> None:
    context = Context(environ={})
    seen = []
    for iteration in (100, 101):
        context.set_moment(iteration=iteration, sample_idx=iteration * 2)
        for _ in range(2):
            context.begin_micro_batch()
            seen.append((*at(context), context.moment().sample_idx))
        context.optimizer_stepped()
    assert seen == [(100, 0, 200), (100, 1, 200), (101, 0, 202), (101, 1, 202)]


def test_setting_the_same_iteration_again_keeps_the_micro_batch() -> None:
    context = Context(environ={})
    for expected in range(3):
        context.set_moment(iteration=5)
        context.begin_micro_batch()
        assert at(context) == (5, expected)


def test_a_set_micro_batch_stays_until_it_is_set_or_a_new_iteration_is() -> None:
    context = Context(environ={})
    context.set_moment(iteration=1, micro_batch=7)
    context.begin_micro_batch()
    context.begin_micro_batch()
    assert at(context) == (1, 7)

    context.set_moment(iteration=2)
    assert at(context) == (2, 0)
    context.begin_micro_batch()
    context.begin_micro_batch()
    assert at(context) == (2, 1)


def test_none_hands_a_field_back_to_the_automatic_count() -> None:
    context = Context(environ={})
    context.set_moment(iteration=9)
    context.begin_micro_batch()
    context.set_moment(iteration=None)
    context.optimizer_stepped()
    context.begin_micro_batch()
    assert at(context) == (10, 0)


@pytest.mark.parametrize(
    "values",
    [
        {"iteration": -1},
        {"iteration": 1.5},
        {"sample_idx": "3"},
        {"batch_idx": 2**63},
        {"sequence_idx": torch.tensor([1, 2])},
        {"step": 1},
        {"micro_batch": torch.empty((), dtype=torch.int64, device="meta")},
    ],
)
def test_a_moment_that_is_no_index_is_refused_and_changes_nothing(values: dict[str, object]) -> None:
    context = Context(environ={})
    with pytest.raises(ConfigError):
        context.set_moment(**({"iteration": 3} | values))
    assert at(context) == (0, 0)


def test_integers_of_other_kinds_are_taken() -> None:
    context = Context(environ={})
    context.set_moment(iteration=torch.tensor(4), batch_idx=True)
    assert context.moment().iteration == 4
    assert type(context.moment().iteration) is int
    assert type(context.moment().batch_idx) is int


@pytest.mark.parametrize(
    ("environ", "rank", "source"),
    [
        ({}, 0, "default"),
        ({"RANK": "3"}, 3, "env RANK"),
        ({"LOCAL_RANK": "2"}, 2, "env LOCAL_RANK"),
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 5, "env RANK"),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, 1, "env LOCAL_RANK"),
        ({"RANK": "9", "LOCAL_RANK": "1"}, 9, "env RANK"),
        ({"RANK": "x", "LOCAL_RANK": "-1"}, 0, "default"),
        ({"RANK": "9" * 30}, 0, "default"),
    ],
)
def test_the_rank_comes_from_the_launcher(environ: dict[str, str], rank: int, source: str) -> None:
    info = find_rank(environ)
    assert (info.rank, info.source) == (rank, source)


def test_sizes_and_attempt_come_from_the_launcher() -> None:
    info = find_rank(
        {
            "RANK": "5",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "8",
            "LOCAL_WORLD_SIZE": "4",
            "TORCHELASTIC_RESTART_COUNT": "2",
        }
    )
    assert (info.world_size, info.local_rank, info.local_world_size, info.attempt) == (8, 1, 4, 2)


@pytest.mark.parametrize(
    ("environ", "attempt"),
    [
        ({"SLURM_RESTART_COUNT": "0"}, 0),
        ({"SLURM_RESTART_COUNT": "2"}, 2000),
        ({"SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "3"}, 2003),
        ({"SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "3", "CAPD_ATTEMPT": "1"}, 4),
        ({"SLURM_RESTART_COUNT": "9" * 30}, 0),
    ],
)
def test_a_requeued_job_never_reuses_the_number_of_an_earlier_attempt(
    environ: dict[str, str], attempt: int
) -> None:
    assert find_rank(environ).attempt == attempt


def test_the_rank_follows_torch_distributed_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    changes: list[int] = []
    context = Context(environ={"LOCAL_RANK": "1"}, on_rank_change=lambda: changes.append(context.rank))
    assert context.bind() == 1

    monkeypatch.setattr("capd_client.steps.context.distributed_ready", lambda: True)
    monkeypatch.setattr(ranks, "distributed_ready", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 6)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 8)

    with caplog.at_level(logging.WARNING):
        assert [context.bind() for _ in range(3)] == [6, 6, 6]
    assert len(caplog.records) == 1
    assert "rank 1" in caplog.text
    assert "rank 6" in caplog.text
    assert changes == [6]


def test_a_reason_is_logged_once_per_interval_with_the_number_held_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    notices = RateLimitedLog(clock=lambda: now[0])
    for _ in range(100):
        notices.warn("full", "the arena is full")
        notices.warn("other", "something else: %d", 3)
    assert [record.getMessage() for record in caplog.records] == [
        "capd: the arena is full",
        "capd: something else: 3",
    ]

    now[0] = INTERVAL_S
    notices.warn("full", "the arena is full")
    assert caplog.records[-1].getMessage() == "capd: the arena is full (99 more like it since the last line)"


def test_a_broken_log_handler_never_reaches_the_job() -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("disk full")

    handler = Broken()
    logging.getLogger("capd_client").addHandler(handler)
    try:
        RateLimitedLog().warn("x", "something")
    finally:
        logging.getLogger("capd_client").removeHandler(handler)
