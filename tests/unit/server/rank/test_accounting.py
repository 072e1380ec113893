"""Both sides' counters, put together: offered = committed + in flight + Σ dropped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from capd.server.rank.accounting import DAEMON_REASONS, PageCounters, reconcile
from capd_client.protocol.counter_page import DropReason

R = DropReason


def test_while_the_rank_lives_the_rest_is_in_flight() -> None:
    totals = reconcile(PageCounters(10, {R.ARENA_FULL: 2}), 5, {}, in_work=None)

    assert (totals.offered, totals.committed, totals.in_flight, totals.dropped) == (
        10,
        5,
        3,
        {R.ARENA_FULL: 2},
    )


def test_what_a_dead_rank_never_handed_over_is_rank_died() -> None:
    totals = reconcile(PageCounters(10, {R.ARENA_FULL: 2}), 4, {}, in_work=1)

    assert totals.in_flight == 1
    assert totals.dropped == {R.ARENA_FULL: 2, R.RANK_DIED: 3}


def test_a_refusal_the_rank_never_heard_of_is_counted_once() -> None:
    assert reconcile(PageCounters(3, {}), 1, {R.DISK_FULL: 2}, in_work=0).dropped == {R.DISK_FULL: 2}
    assert reconcile(PageCounters(3, {R.DISK_FULL: 2}), 1, {R.DISK_FULL: 2}, in_work=0).dropped == {
        R.DISK_FULL: 2
    }
    assert reconcile(PageCounters(5, {R.DISK_FULL: 4}), 1, {R.DISK_FULL: 2}, in_work=0).dropped == {
        R.DISK_FULL: 4
    }


def test_what_was_committed_after_all_is_not_dropped_too() -> None:
    page = PageCounters(10, {R.NOT_CONNECTED: 4, R.REJECTED: 2})

    totals = reconcile(page, 9, {}, in_work=0)

    assert totals.dropped == {R.REJECTED: 1}


@given(st.data())
def test_counters_of_a_gone_rank_always_add_up(data: st.DataObject) -> None:
    """Each capture has one true fate; the page and the daemon know it only in part."""
    committed = data.draw(st.integers(0, 50))
    in_work = data.draw(st.integers(0, 10))
    own_drops = data.draw(st.dictionaries(st.sampled_from([R.ARENA_FULL, R.TOO_LARGE]), st.integers(1, 20)))
    refused = data.draw(st.dictionaries(st.sampled_from(sorted(DAEMON_REASONS, key=str)), st.integers(1, 20)))
    heard = {reason: data.draw(st.integers(0, count)) for reason, count in refused.items()}
    lost = data.draw(st.integers(0, 20))
    # At exit the rank gives up some of what is lost, in work, committed or refused without its hearing of it.
    unheard = sum(refused.values()) - sum(heard.values())
    given_up = data.draw(st.integers(0, lost + in_work + committed + unheard))
    offered = committed + in_work + sum(own_drops.values()) + sum(refused.values()) + lost
    page = PageCounters(offered, {**own_drops, **heard, R.NOT_CONNECTED: given_up})

    totals = reconcile(page, committed, refused, in_work=in_work)

    assert totals.offered == totals.committed + totals.in_flight + sum(totals.dropped.values())
    assert totals.committed == committed
    assert all(totals.dropped[reason] == count for reason, count in {**own_drops, **refused}.items())
