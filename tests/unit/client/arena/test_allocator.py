"""The slot allocator: never overlapping, aligned, and whole again when everything is given back."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from capd_client.arena.allocator import ALIGNMENT, GRANULE_NBYTES, SMALL_NBYTES, Extents, Slot, SlotAllocator

START = 4096


class SlotsMachine(RuleBasedStateMachine):
    """Random takes and gives, against the list of what is taken."""

    @initialize(granules=st.integers(1, 2048))
    def begin(self, granules: int) -> None:
        self.nbytes = granules * GRANULE_NBYTES
        self.slots = SlotAllocator(START, self.nbytes)
        self.taken: list[tuple[Slot, int]] = []

    @rule(nbytes=st.one_of(st.integers(0, 300), st.integers(0, SMALL_NBYTES + 100), st.integers(0, 4 << 20)))
    def take(self, nbytes: int) -> None:
        slot = self.slots.take(nbytes)
        if slot is not None:
            self.taken.append((slot, nbytes))
        elif not self.taken:
            assert -(-nbytes // GRANULE_NBYTES) * GRANULE_NBYTES > self.nbytes, "an empty arena refused"

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.taken) - 1))
        slot, _ = self.taken.pop(index)
        self.slots.give(slot)

    @rule(data=st.data(), nbytes=st.integers(0, SMALL_NBYTES + 100))
    def break_off(self, data: st.DataObject, nbytes: int) -> None:
        """Errors come after a slot was taken or given, and before its owner knows."""
        self.slots.take(nbytes)
        if self.taken:
            self.slots.give(data.draw(st.sampled_from(self.taken))[0])
        self.slots.keep([slot for slot, _ in self.taken])

    @invariant()
    def slots_are_disjoint_inside_and_aligned(self) -> None:
        end = START
        for (offset, extent, _), nbytes in sorted(self.taken, key=lambda entry: entry[0][0]):
            if nbytes == 0:
                continue
            assert offset >= end
            assert extent >= nbytes
            assert offset % ALIGNMENT == 0
            end = offset + extent
        assert end <= START + self.nbytes

    def teardown(self) -> None:
        for slot, _ in self.taken:
            self.slots.give(slot)
        whole = self.slots.take(self.nbytes)
        assert whole == (START, self.nbytes, None), "not one block again after everything was given back"


TestSlots = SlotsMachine.TestCase


def test_first_fit_takes_the_lowest_address() -> None:
    extents = Extents(0, 100)
    first, second, third = extents.take(10), extents.take(10), extents.take(10)
    assert (first, second, third) == (0, 10, 20)

    extents.give(0, 10)
    extents.give(20, 10)

    assert extents.take(5) == 0
    assert extents.take(10) == 20
    assert extents.free_nbytes == 75


@pytest.mark.parametrize(("start", "nbytes"), [(0, 10), (5, 10), (40, 10), (45, 20)])
def test_giving_what_is_free_is_an_error(start: int, nbytes: int) -> None:
    extents = Extents(0, 100)
    extents.take(40)
    extents.give(0, 10)

    with pytest.raises(ValueError, match="free already"):
        extents.give(start, nbytes)


def test_small_tensors_share_slabs_and_a_stuck_slot_costs_one_slab() -> None:
    slots = SlotAllocator(START, 64 << 20)
    taken = [slots.take(1000) for _ in range(5000)]
    assert slots.free_nbytes == 59 << 20  # 1024 of them in a slab of 1 MiB

    for slot in taken[1:]:
        assert slot is not None
        slots.give(slot)

    assert slots.free_nbytes >= 62 << 20
    assert slots.take(60 << 20) is not None


def test_no_bytes_need_no_room() -> None:
    slots = SlotAllocator(START, GRANULE_NBYTES)
    assert slots.take(GRANULE_NBYTES) is not None
    assert slots.take(1) is None

    empty = slots.take(0)

    assert empty == (0, 0, None)
    slots.give(empty)
