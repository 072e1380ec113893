"""Records in parts at the session: taken in order and once, answered from what is known, counted where it must be."""

from __future__ import annotations

import pytest

from capd.server.rank.parts import MAX_UNFINISHED
from capd.server.rank.session import Session
from capd_client.protocol.counter_page import DROP_REASONS, DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import (
    Ack,
    DaemonMessage,
    Define,
    Descriptor,
    Flush,
    Flushed,
    Hello,
    Nack,
    Part,
)

CLIENT = b"c" * 16
DEFINE = Define(id=0, key=Key(quant_type="bf16", rank=0, tensor_name="x"), dtype="uint8")
RECORD = 10
NBYTES = 30


def connect(session: Session) -> Session:
    connection = (session.connection or 0) + 1
    hello = Hello(protocol=2, client=CLIENT, connection=connection, rank=0, arena_nbytes=1 << 20)
    assert session.connect(hello) is None
    return session


@pytest.fixture
def session() -> Session:
    return connect(Session(CLIENT, "run"))


def part(first: int, nbytes: int = 10, *, record: int = RECORD, sequence: int | None = None) -> Descriptor:
    """Bytes from `first` on; the sequence follows from it."""
    sequence = record + 1 + first // 10 if sequence is None else sequence
    return Descriptor(
        sequence, 4096, nbytes, 0, (NBYTES,), Moment(iteration=4), part=Part(record, first, NBYTES)
    )


def give_up() -> Descriptor:
    return part(20, 0, sequence=RECORD + 9)


def put(session: Session, *items: Descriptor) -> list[int]:
    return [item.sequence for item, _ in session.put([(item, DEFINE, None) for item in items])]


def acked(replies: list[DaemonMessage]) -> list[int]:
    return [
        n
        for reply in replies
        if isinstance(reply, Ack)
        for first, last in reply.ranges
        for n in range(first, last + 1)
    ]


def nacked(replies: list[DaemonMessage]) -> dict[int, DropReason]:
    rows = [row for reply in replies if isinstance(reply, Nack) for row in reply.rows]
    return {row.sequence: DROP_REASONS[row.reason] for row in rows}


def test_parts_are_acknowledged_one_by_one_and_the_record_counts_at_the_last(session: Session) -> None:
    assert put(session, part(0), part(10)) == [11, 12]
    assert session.records_in_work == 1
    session.committed(11)
    assert acked(session.take_replies()) == [11]
    session.committed(12)
    assert len(session.done) == 0
    assert put(session, part(20)) == [13]
    session.committed(13)
    assert acked(session.take_replies()) == [12, 13]
    assert session.done.ranges() == [(RECORD, RECORD)]


@pytest.mark.parametrize("restarted", [False, True])
def test_any_part_of_a_committed_record_is_acknowledged_again(session: Session, restarted: bool) -> None:
    put(session, part(0), part(10), part(20))
    for sequence in (11, 12, 13):
        session.committed(sequence)
    after = Session(CLIENT, "run", session.done.ranges()) if restarted else session
    assert put(connect(after), part(0), part(10), part(20)) == []
    assert acked(after.take_replies()) == [11, 12, 13]


def test_repeated_parts_join_the_work_or_are_acknowledged_again(session: Session) -> None:
    put(session, part(0), part(10))
    session.committed(11)
    connect(session)  # the acknowledgement of 11 is lost
    assert put(session, part(0), part(10), part(20)) == [13]
    assert acked(session.take_replies()) == [11]


def test_another_daemon_refuses_what_lacks_its_beginning_and_leaves_the_counting_to_the_rank(
    session: Session,
) -> None:
    assert put(session, part(10), part(20)) == []
    assert nacked(session.take_replies()) == {12: DropReason.PARTS_LOST, 13: DropReason.PARTS_LOST}
    assert session.refused_counts == {}
    assert session.ledger.rows() == []


def test_a_refused_part_refuses_all_of_them_under_its_reason_and_counts_with_the_last(
    session: Session,
) -> None:
    put(session, part(0), part(10), part(20))
    session.refused(11, DropReason.DISK_FULL, "full")
    assert session.refused_counts == {}
    session.refused(12, DropReason.STORE_ERROR, "a part before it was refused")
    session.refused(13, DropReason.STORE_ERROR, "a part before it was refused")
    assert set(nacked(session.take_replies()).values()) == {DropReason.DISK_FULL}
    assert session.refused_counts == {DropReason.DISK_FULL: 1}
    [row] = session.ledger.rows()
    assert (row.count, row.nbytes, row.first_iteration) == (1, NBYTES, 4)
    assert put(session, part(10)) == []
    assert nacked(session.take_replies()) == {12: DropReason.DISK_FULL}


def test_a_record_given_up_is_let_go_of_and_none_of_its_parts_begins_it_anew(session: Session) -> None:
    put(session, part(0), part(10))
    session.committed(11)
    assert put(session, give_up()) == [19]
    connect(session)
    assert put(session, part(0), part(10), give_up()) == []  # 12 and 19 are in work
    assert acked(session.take_replies()) == [11]
    session.committed(12)
    session.committed(19)
    assert acked(session.take_replies()) == [12, 19]
    assert (len(session.done), session.refused_counts, session.in_work) == (0, {}, {})


def test_giving_up_what_nobody_knows_is_acknowledged(session: Session) -> None:
    assert put(session, give_up()) == [19]
    session.committed(19)
    assert acked(session.take_replies()) == [19]


@pytest.mark.parametrize("second", [part(20, sequence=12), part(5, 20, sequence=12)], ids=["gap", "overlap"])
def test_parts_out_of_order_are_refused(session: Session, second: Descriptor) -> None:
    put(session, part(0))
    assert put(session, second) == []
    assert nacked(session.take_replies()).keys() == {12}


def other_size() -> Descriptor:
    return Descriptor(12, 4096, 10, 0, (20,), Moment(), part=Part(RECORD, 10, 20))


def test_parts_that_name_another_size_refuse_the_record(session: Session) -> None:
    put(session, part(0))
    assert put(session, other_size()) == []
    assert nacked(session.take_replies()) == {12: DropReason.BAD_DESCRIPTOR}
    assert put(session, part(10), part(20)) == []


def test_what_is_here_of_a_refused_record_is_let_go_of_and_makes_room(session: Session) -> None:
    put(session, part(0))
    put(session, other_size())
    put(session, part(0, record=100))
    session.put([(part(10, record=100), DEFINE, "its metadata is no JSON")])
    assert session.take_abandoned() == [RECORD, 100]
    assert session.take_abandoned() == []
    records = [part(0, record=1000 * n) for n in range(1, MAX_UNFINISHED + 1)]
    assert len(put(session, *records)) == MAX_UNFINISHED


def test_a_record_that_is_whole_cannot_be_given_up(session: Session) -> None:
    put(session, part(0), part(10), part(20))
    assert put(session, give_up()) == []
    assert acked(session.take_replies()) == [19]
    assert put(session, part(0, sequence=18)) == [], "it is not begun anew beside itself"


def test_one_sequence_is_not_a_record_in_parts_and_another_one(session: Session) -> None:
    plain = Descriptor(RECORD, 4096, 10, 0, (10,), Moment())
    put(session, part(0))
    assert put(session, plain) == []
    assert nacked(session.take_replies()) == {RECORD: DropReason.BAD_DESCRIPTOR}

    other = connect(Session(CLIENT, "run"))
    assert put(other, plain, part(0)) == [RECORD]
    assert nacked(other.take_replies()) == {11: DropReason.BAD_DESCRIPTOR}


def test_records_that_lack_parts_are_limited(session: Session) -> None:
    records = [part(0, record=100 * n) for n in range(1, MAX_UNFINISHED + 2)]
    assert len(put(session, *records)) == MAX_UNFINISHED
    assert nacked(session.take_replies()) == {records[-1].sequence: DropReason.BAD_DESCRIPTOR}

    for record in records[:-1]:
        session.committed(record.sequence)
    session.put([(part(0, NBYTES, record=5, sequence=6), DEFINE, None)])
    assert nacked(session.take_replies()), "what is here stays unfinished"
    assert put(session, part(0, 0, record=100, sequence=199)) == [199]
    session.committed(199)
    assert put(session, part(0, NBYTES, record=6, sequence=7)) == [7]


def test_a_flush_waits_for_what_is_in_work_not_for_what_has_not_come(session: Session) -> None:
    put(session, part(0))
    session.flush(Flush(1, 50))
    assert session.take_replies() == []
    session.committed(11)
    assert Flushed(1) in session.take_replies()


def test_a_rank_that_died_amid_the_parts_is_at_rest(session: Session) -> None:
    put(session, part(0), part(10))
    session.disconnect(1)
    session.die()
    session.committed(11)
    session.committed(12)
    assert session.at_rest
    assert len(session.done) == 0
