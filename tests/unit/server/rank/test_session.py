"""The session's state machine: sequences, takeover, flushes and replies, without any I/O."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capd.server.rank.replies import MAX_FLUSHES
from capd.server.rank.session import MAX_REFUSED, Phase, Session
from capd_client.errors import ProtocolError
from capd_client.protocol.counter_page import DROP_REASONS, DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import (
    Ack,
    Define,
    Descriptor,
    DropRow,
    Drops,
    Flush,
    Flushed,
    Hello,
    Nack,
    NackRow,
    Reject,
)

CLIENT = b"c" * 16
DEFINE = Define(id=0, key=Key(quant_type="bf16", rank=0, tensor_name="x"), dtype="bfloat16")
BAD = DROP_REASONS.index(DropReason.BAD_DESCRIPTOR)
STORE = DROP_REASONS.index(DropReason.STORE_ERROR)


def hello(connection: int) -> Hello:
    return Hello(protocol=2, client=CLIENT, connection=connection, rank=0, arena_nbytes=1 << 20)


def item(sequence: int, iteration: int = 0) -> Descriptor:
    return Descriptor(sequence, 4096, 2, 0, (1,), Moment(iteration=iteration))


def batch(*sequences: int, problem: str | None = None) -> list[tuple[Descriptor, Define, str | None]]:
    return [(item(sequence), DEFINE, problem) for sequence in sequences]


@pytest.fixture
def session() -> Session:
    made = Session(CLIENT, "run", [(0, 4)])
    assert made.connect(hello(1)) is None
    made.define(DEFINE, 100)
    return made


def submitted(session: Session, *sequences: int) -> list[int]:
    return [descriptor.sequence for descriptor, _ in session.put(batch(*sequences))]


def test_a_new_sequence_is_submitted_once_and_a_repeated_one_joins_the_work(session: Session) -> None:
    assert submitted(session, 5, 6) == [5, 6]
    assert submitted(session, 5, 6, 7) == [7]
    assert not session.has_replies

    session.committed(5)

    assert session.take_replies() == [Ack([(5, 5)])]


def test_a_committed_sequence_is_acknowledged_again_without_work(session: Session) -> None:
    assert submitted(session, 0, 3) == []

    assert session.take_replies() == [Ack([(0, 0), (3, 3)])]


def test_a_refused_row_has_the_bytes_of_its_tensor(session: Session) -> None:
    row = Descriptor(5, 0, 0, 0, (3, 5), Moment(), row_offset=4096, payload=False)
    session.put([(row, DEFINE, None)])
    session.refused(5, DropReason.DISK_FULL, "full")
    assert [(entry.count, entry.nbytes) for entry in session.ledger.rows()] == [(1, 30)]


def test_acknowledgements_join_to_ranges_whatever_their_order(session: Session) -> None:
    submitted(session, *range(5, 11))
    for sequence in (5, 7, 6, 9, 10):
        session.committed(sequence)

    assert session.take_replies() == [Ack([(5, 7), (9, 10)])]
    assert session.take_replies() == []


def test_a_refused_sequence_is_refused_again_and_counted_once(session: Session) -> None:
    submitted(session, 5)
    session.refused(5, DropReason.DISK_FULL, "full")
    first = session.take_replies()
    submitted(session, 5)
    again = session.take_replies()

    reason = DROP_REASONS.index(DropReason.DISK_FULL)
    assert first == [Nack([NackRow(5, reason, "full")])]
    assert again == [Nack([NackRow(5, reason, "refused before")])]
    assert session.refused_counts == {DropReason.DISK_FULL: 1}


def test_a_bad_descriptor_is_refused_and_the_rest_of_the_batch_is_kept(session: Session) -> None:
    submissions = session.put([*batch(5), *batch(6, problem="too long"), *batch(7)])

    assert [descriptor.sequence for descriptor, _ in submissions] == [5, 7]
    assert session.take_replies() == [Nack([NackRow(6, BAD, "too long")])]
    assert [(row.reason, row.count) for row in session.ledger.rows()] == [("bad_descriptor", 1)]


def test_a_reason_that_ranks_use_themselves_is_counted_as_store_error(session: Session) -> None:
    submitted(session, 5)
    session.refused(5, DropReason.UNSUPPORTED, "no such dtype")

    assert session.refused_counts == {DropReason.STORE_ERROR: 1}
    assert session.take_replies() == [Nack([NackRow(5, STORE, "unsupported: no such dtype")])]


def test_memory_of_refusals_is_bounded(session: Session) -> None:
    for sequence in range(10, 10 + MAX_REFUSED + 5):
        session.put(batch(sequence, problem="bad"))
    session.take_replies()

    session.put(batch(10 + MAX_REFUSED, problem="bad"))  # remembered
    assert session.refused_counts[DropReason.BAD_DESCRIPTOR] == MAX_REFUSED + 5
    session.put(batch(10, problem="bad"))  # forgotten, so tried again
    assert session.refused_counts[DropReason.BAD_DESCRIPTOR] == MAX_REFUSED + 6


def test_an_older_or_equal_connection_is_superseded(session: Session) -> None:
    for connection in (0, 1):
        reject = session.connect(hello(connection))
        assert isinstance(reject, Reject)
        assert reject.code == "superseded"
    assert session.connection == 1


def test_a_newer_connection_takes_over_with_an_empty_key_table_and_the_work_goes_on(session: Session) -> None:
    submitted(session, 5, 6)
    assert session.connect(hello(7)) is None
    assert session.keys == {}

    assert submitted(session, 5, 6) == []
    session.committed(5)
    session.committed(6)
    assert session.take_replies() == [Ack([(5, 6)])]
    assert not session.disconnect(1)  # the old connection's end changes nothing
    assert session.phase is Phase.LIVE


def test_outcomes_while_nobody_is_connected_are_told_when_asked_again(session: Session) -> None:
    submitted(session, 5, 6)
    assert session.disconnect(1)
    session.committed(5)
    session.refused(6, DropReason.STORE_ERROR, "disk")
    assert not session.has_replies

    session.connect(hello(2))
    submitted(session, 5, 6)

    assert session.take_replies() == [Ack([(5, 5)]), Nack([NackRow(6, STORE, "refused before")])]


def test_flush_is_answered_after_the_last_outcome_it_waits_for(session: Session) -> None:
    submitted(session, 5, 6, 7)
    session.flush(Flush(1, 6))
    session.flush(Flush(2, 4))
    assert session.take_replies() == [Flushed(2)]

    session.committed(7)
    session.committed(5)
    assert Flushed(1) not in session.take_replies()
    session.refused(6, DropReason.STORE_ERROR, "disk")

    replies = session.take_replies()
    assert isinstance(replies[0], Nack)
    assert replies[-1] == Flushed(1)


def test_too_many_unanswered_flushes_end_the_connection(session: Session) -> None:
    submitted(session, 5)
    for number in range(MAX_FLUSHES):
        session.flush(Flush(number, 5))
    with pytest.raises(ProtocolError):
        session.flush(Flush(99, 5))


def test_a_key_id_keeps_its_meaning(session: Session) -> None:
    session.define(DEFINE, 100)
    with pytest.raises(ProtocolError, match="twice"):
        session.define(Define(id=0, key=DEFINE.key, dtype="float32"), 100)


def test_definitions_are_bounded_in_bytes(session: Session) -> None:
    for number in range(1, 64):
        session.define(Define(id=number, key=DEFINE.key, dtype="float32"), 1 << 20)
    with pytest.raises(ProtocolError, match="exceed"):
        session.define(Define(id=64, key=DEFINE.key, dtype="float32"), 1 << 20)


def test_the_ledger_keeps_the_larger_cumulative_count(session: Session) -> None:
    full = DROP_REASONS.index(DropReason.ARENA_FULL)
    session.drops(Drops([DropRow(0, full, 5, 500, 1, 9)]))
    session.drops(Drops([DropRow(0, full, 3, 300, 1, 7)]))  # late

    assert [(row.count, row.nbytes, row.last_iteration) for row in session.ledger.rows()] == [(5, 500, 9)]
    with pytest.raises(ProtocolError, match="never defined"):
        session.drops(Drops([DropRow(9, full, 1, 1, 0, 0)]))


def test_the_ledger_is_bounded_over_all_connections(session: Session) -> None:
    full = DROP_REASONS.index(DropReason.ARENA_FULL)
    kept = 0
    for ordinal in range(2, 40):
        session.connect(hello(ordinal))
        for at in range(1000):
            key = Key(quant_type="bf16", rank=0, tensor_name=f"{ordinal}-{at}", module="m" * 256)
            session.define(Define(id=at, key=key, dtype="bfloat16"), 600)
        session.drops(Drops([DropRow(at, full, 1, 1, 0, 0) for at in range(1000)]))
        kept = len(session.ledger.rows())
    assert 20_000 < kept < 36_000

    session.drops(Drops([DropRow(0, full, 2, 2, 0, 0)]))  # a row that there is no room for
    assert len(session.ledger.rows()) == kept


def test_a_died_session_rests_only_when_its_work_is_done_and_can_come_back(session: Session) -> None:
    submitted(session, 5)
    session.disconnect(1)
    session.die()
    assert not session.at_rest
    session.committed(5)
    assert session.at_rest

    assert session.connect(hello(2)) is None
    assert not session.at_rest


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 12)),
        st.tuples(st.just("commit"), st.integers(0, 12)),
        st.tuples(st.just("refuse"), st.integers(0, 12)),
        st.tuples(st.just("reconnect"), st.just(0)),
        st.tuples(st.just("lose"), st.just(0)),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_every_sequence_has_one_outcome_and_a_re_put_always_learns_it(
    operations: list[tuple[str, int]],
) -> None:
    session, connection = Session(CLIENT, "run"), 1
    session.connect(hello(connection))
    submissions: list[int] = []
    outcome: dict[int, str] = {}
    for action, number in operations:
        if action == "put" and session.phase is Phase.LIVE:
            submissions += [descriptor.sequence for descriptor, _ in session.put(batch(number))]
        elif action in ("commit", "refuse") and number in session.in_work:
            outcome[number] = action
            if action == "commit":
                session.committed(number)
            else:
                session.refused(number, DropReason.STORE_ERROR, "")
        elif action == "lose":
            session.disconnect(connection)
        elif action == "reconnect":
            connection += 1
            session.connect(hello(connection))

    assert len(submissions) == len(set(submissions))  # nothing is written twice
    session.connect(hello(connection + 1))
    for number in submissions:
        session.put(batch(number))
    replies = session.take_replies()
    acked = {
        n for reply in replies if isinstance(reply, Ack) for a, b in reply.ranges for n in range(a, b + 1)
    }
    nacked = {row.sequence for reply in replies if isinstance(reply, Nack) for row in reply.rows}
    assert acked == {number for number, what in outcome.items() if what == "commit"}
    assert nacked == {number for number, what in outcome.items() if what == "refuse"}
    assert set(session.in_work) == set(submissions) - acked - nacked
    assert sum(session.refused_counts.values()) == len(nacked)
