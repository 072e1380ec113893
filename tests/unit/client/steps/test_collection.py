"""Which micro-batches a collection run takes: N in all, at most M of an iteration, the same ones on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capd_client.config.settings import ClientConfig
from capd_client.errors import ConfigError
from capd_client.process.documents import left
from capd_client.protocol.key import Moment
from capd_client.protocol.quota import Collected, Quota, parse_quota
from capd_client.protocol.selection import Ranges
from capd_client.rules.resolve import When
from capd_client.steps.collection import quota_of, within_quota
from capd_client.steps.context import Context
from capd_client.steps.gate import Gate


def taken(quota: Quota, iterations: range, micro_batches: int) -> list[tuple[int, int]]:
    """Of a job with so many micro-batches per iteration, those that the quota takes; each is asked about twice."""
    return [
        (iteration, micro_batch)
        for iteration in iterations
        for micro_batch in range(micro_batches)
        if quota.take(iteration, micro_batch) and quota.take(iteration, micro_batch)
    ]


def test_three_in_all_and_two_of_an_iteration_are_two_and_one() -> None:
    assert taken(Quota(3, 2), range(5), 4) == [(0, 0), (0, 1), (1, 0)]


def test_a_job_that_resumes_or_has_fewer_micro_batches_still_gets_all_of_them() -> None:
    assert taken(Quota(3, 2), range(700, 705), 1) == [(700, 0), (701, 0), (702, 0)]
    assert taken(Quota(None, 2), range(3), 3) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_it_is_complete_only_when_the_iteration_of_the_last_one_is_over() -> None:
    states: list[str] = []
    quota = Quota(1, 1, lambda: states.append(quota.state))

    quota.take(0, 0)
    quota.take(0, 1)
    assert (quota.state, quota.kept, states) == ("reached", 1, ["reached"])
    assert not quota.take(1, 0)
    assert (quota.state, quota.kept, states) == ("complete", 1, ["reached", "complete"])


@given(st.integers(1, 40), st.integers(1, 6), st.lists(st.integers(1, 5), min_size=40, max_size=60))
def test_any_job_long_enough_gives_exactly_n_in_order_and_never_more_than_m_of_an_iteration(
    total: int, per_iteration: int, sizes: list[int]
) -> None:
    quota = Quota(total, per_iteration)
    found = [
        (iteration, micro_batch)
        for iteration, size in enumerate(sizes)
        for micro_batch in range(size)
        if quota.take(iteration, micro_batch)
    ]

    everything = [
        (iteration, micro_batch)
        for iteration, size in enumerate(sizes)
        for micro_batch in range(min(size, per_iteration))
    ]
    assert found == everything[:total]
    assert quota.kept == total


def test_a_gate_takes_of_what_its_rules_admit_and_is_closed_when_the_quota_is_complete() -> None:
    context = Context(environ={})
    whens = [When(Ranges("1-"), micro_batches=Ranges("1-"))]
    gate = Gate(context, whens, Quota(3, 2))
    admitted = []
    for iteration in range(6):
        for micro_batch in range(4):
            context.iteration, context.micro_batch = iteration, micro_batch
            if gate.admits():
                admitted.append((iteration, micro_batch))

    assert admitted == [(1, 1), (1, 2), (2, 1)]
    assert gate.closed_at == 5


def test_the_watches_of_a_session_share_one_quota_and_each_process_says_how_far_it_is(tmp_path: Path) -> None:
    context = Context(environ={"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    config = ClientConfig(collect="1/1", collect_dir=str(tmp_path))
    assert quota_of(ClientConfig(), context) is None
    quota = quota_of(config, context)

    assert quota is not None
    assert quota_of(config, context) is quota
    seen = [left(tmp_path, Collected)]
    quota.take(0, 0)
    seen.append(left(tmp_path, Collected))
    quota.room(1)
    seen.append(left(tmp_path, Collected))
    assert [(one.rank, one.local_world_size, one.kept, one.state) for (one,) in seen] == [
        (3, 2, 0, "collecting"), (3, 2, 1, "reached"), (3, 2, 1, "complete")
    ]  # fmt: skip
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600]


def test_a_directory_that_is_gone_costs_a_warning_and_no_capture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quota = quota_of(ClientConfig(collect="2/1", collect_dir=str(tmp_path / "gone")), Context(environ={}))

    assert quota is not None
    assert quota.take(0, 0)
    assert "the progress of the collection cannot be written" in caplog.text


@pytest.mark.parametrize("text", ["", "3", "0/1", "3/0", "3/all", "-1/1", "3/2/1", "²/1", "9999999999/1"])
def test_what_is_no_quota_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="N/M"):
        parse_quota(text)


def test_quotas_are_read() -> None:
    assert parse_quota(" 3/2 ") == (3, 2)
    assert parse_quota("all/2") == (None, 2)


def test_a_caller_that_numbers_iterations_from_one_does_not_complete_the_quota_of_a_watch() -> None:
    context, config = Context(environ={}), ClientConfig(collect="1/1")
    quota = quota_of(config, context)
    assert quota is not None
    gate = Gate(context, [When(Ranges("0-"))], quota)

    assert gate.admits()
    assert within_quota(config, context, Moment(iteration=1))
    assert gate.admits()
    assert quota.state == "reached"
