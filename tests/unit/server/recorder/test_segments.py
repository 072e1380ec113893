"""Segments: whole records come back, torn ones do not, and damage hides nothing but what it hits."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from capd.server.recorder.held_record import HEAD_NBYTES, HeldIdentity, HeldRecord, encode_record
from capd.server.recorder.segment import DamagedFrame, FoundRecord, HeldFile
from capd_client.protocol.key import Moment
from capd_client.protocol.messages import Descriptor
from tests.unit.server.recorder.desk import DEFINE, overwrite, payload

CLIENT = b"c" * 16
SIZES = [16, 0, 40, 8, 24]


def write(path: Path) -> list[int]:
    """Write a segment. Returns the offsets of its frames, and its end."""
    segment, starts = HeldFile(path, in_memory=False), [0]
    for sequence, nbytes in enumerate(SIZES, 1):
        item = Descriptor(sequence, 0, nbytes, 0, (nbytes,), Moment(iteration=7))
        description = encode_record(HeldRecord(CLIENT, sequence, DEFINE, item))
        data = payload(sequence, nbytes)
        segment.append(HeldIdentity(CLIENT, sequence), description, [data[:5], data[5:]])
        starts.append(segment.nbytes)
    return starts


def survey(path: Path) -> tuple[list[int], list[int | None]]:
    """The sequences of the whole records, whose bytes are right, and those of the damaged ones."""
    segment = HeldFile(path, in_memory=False, is_new=False)
    whole, damaged = [], []
    for found in segment.survey():
        if isinstance(found, DamagedFrame):
            damaged.append(None if found.identity is None else found.identity.sequence)
            continue
        sequence = found.record.sequence
        assert bytes(found.data.read(0, found.data.nbytes)) == payload(sequence, SIZES[sequence - 1])
        whole.append(sequence)
    assert whole == [found.record.sequence for found in segment.waiting(segment.nbytes)]
    return whole, damaged


def test_what_is_appended_comes_back(tmp_path: Path) -> None:
    starts = write(tmp_path / "s")

    assert survey(tmp_path / "s") == ([1, 2, 3, 4, 5], [])
    assert starts[-1] == (tmp_path / "s").stat().st_size


def test_a_file_that_ends_at_any_byte_gives_the_whole_records_before_it_and_no_other(tmp_path: Path) -> None:
    starts = write(tmp_path / "s")
    content = (tmp_path / "s").read_bytes()
    for end in range(len(content) + 1):
        torn = tmp_path / "torn"
        torn.write_bytes(content[:end])
        count = sum(start <= end for start in starts[1:])
        whole, damaged = survey(torn)
        assert whole == list(range(1, count + 1))
        # A kill does not cut a file: the next record was acknowledged, and its head names it if it is whole.
        if end in starts:
            assert damaged == []
        else:
            assert damaged == [count + 1 if end >= starts[count] + HEAD_NBYTES else None]


def test_a_kill_at_any_byte_of_an_append_leaves_the_records_before_it(tmp_path: Path) -> None:
    starts = write(tmp_path / "s")
    content = (tmp_path / "s").read_bytes()
    for count, (first, last) in enumerate(itertools.pairwise(starts)):
        for end in range(first + HEAD_NBYTES, last + 1):
            # The head comes last.
            torn = tmp_path / "torn"
            torn.write_bytes(content[:first] + bytes(HEAD_NBYTES) + content[first + HEAD_NBYTES : end])
            assert survey(torn) == (list(range(1, count + 1)), [])


def test_damage_at_any_byte_hides_one_record_and_names_it(tmp_path: Path) -> None:
    starts = write(tmp_path / "s")
    content = (tmp_path / "s").read_bytes()
    data = {
        at
        for start, end, nbytes in zip(starts, starts[1:], SIZES, strict=False)
        for at in range(end - nbytes, end)
        if start < end
    }
    for at in range(len(content)):
        hit = sum(start <= at for start in starts)
        damaged = tmp_path / "damaged"
        damaged.write_bytes(content)
        overwrite(damaged, at, bytes([content[at] ^ 0xFF]))
        if at in data:
            # The data is not read here. Its checksum is compared when it leaves.
            continue
        is_head_of_last = starts[-2] <= at < starts[-2] + HEAD_NBYTES
        found = survey(damaged)
        assert found == ([one for one in range(1, 6) if one != hit], [None if is_head_of_last else hit])


def test_damaged_data_is_found_when_it_is_read(tmp_path: Path) -> None:
    starts = write(tmp_path / "s")
    overwrite(tmp_path / "s", starts[3] - 1, b"!")
    segment = HeldFile(tmp_path / "s", in_memory=False, is_new=False)
    records = {one.record.sequence: one.data for one in segment.survey() if isinstance(one, FoundRecord)}

    for limit in (0, 1 << 20):
        for sequence, data in records.items():
            if sequence == 3:
                with pytest.raises(OSError, match="are damaged"):
                    data.checked(limit)
            else:
                assert bytes(data.checked(limit) if limit else data.read(0, data.nbytes)) == payload(
                    sequence, SIZES[sequence - 1]
                )
