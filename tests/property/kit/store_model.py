"""What clients were promised of a store, compared with what is in it at every start.

A table of what was offered and what the daemon said of it. Acknowledged records are there, once, in order, bit for
bit: after a kill always, after a power loss if the store is durable or the records were sealed. Refused ones never
are. Of the others each may be there or not, and `committed`, by which a client decides what to send again, says
exactly which.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from capd.errors import StoreError
from capd_client.protocol.key import Key
from tests.property.kit.observing import Found, Seen, read_with_capd, read_with_zarr
from tests.property.kit.store_driver import Crash, Offer, StoreDriver

__all__ = ["SHAPES", "StoreModel"]

CLIENTS = (b"client-a" * 2, b"client-b" * 2)
SHAPES: tuple[tuple[str, str, type[np.generic], tuple[int, ...]], ...] = (  # -1: varies from record to record
    ("fixed", "float32", np.float32, (8,)),
    ("ragged", "bfloat16", np.uint16, (-1, 4)),
    ("scalar", "int64", np.int64, ()),
    ("large", "float32", np.float32, (-1, 64)),
    ("chunks", "float8_e4m3fn", np.uint8, (-1, 1500)),
    ("statistics", "uint8", np.uint8, (-1, 4)),
)
LENGTHS = {"ragged": (0, 1, 3, 5, 9), "large": (9, 5, 0, 12), "chunks": (3, 2, 4), "statistics": (0, 2, 900)}


class StoreModel:
    """The promises of one run, through all lives of its store. Every method fails where one is broken."""

    def __init__(self, driver: StoreDriver, *, durable: bool) -> None:
        self.driver, self.durable = driver, durable
        self.armed = Crash("kill", 0)
        self.offers: dict[int, Offer] = {}
        self.order: dict[int, int] = {}  # identity → when it was offered last
        self.acked: set[int] = set()
        self.never: set[int] = set()  # refused, or known to be gone
        self.open: set[int] = set()  # offered, and no answer came
        self.unsure: set[int] = set()  # refused with a group of which a part was durable already
        self.sealed: set[int] = set()
        self.damaged: set[int] = set()
        self._turn = 0

    def new(self, series: int, client: int, length: int, repeated: bool) -> Offer:
        """A record that no client has offered yet. length: which of the lengths that the series' shapes take."""
        name, dtype, stored, pattern = SHAPES[series]
        lengths = LENGTHS.get(name, (0,))
        shape = tuple(lengths[length % len(lengths)] if n < 0 else n for n in pattern)
        identity = len(self.offers) + 1
        content = np.random.default_rng(series if repeated else identity + 100)
        nbytes = int(np.prod(shape)) * np.dtype(stored).itemsize
        bits = np.frombuffer(content.integers(1, 256, nbytes, np.uint8).tobytes(), stored).reshape(shape)
        key = Key(quant_type="bf16", rank=client, layer=0, tensor_name=name)
        offer = Offer(identity, CLIENTS[client], identity, key, dtype, bits, payload=name != "statistics")
        self.offers[identity] = offer
        return offer

    def offer(self, offers: list[Offer]) -> None:
        """Let clients send records; they hear of each, unless the process ends."""
        for offer in offers:
            self._turn += 1
            self.order[offer.identity] = self._turn
            self.open.add(offer.identity)
            self.never.discard(offer.identity)
        outcomes = self.driver.outcomes
        outcomes.acked.clear()
        outcomes.refused.clear()
        failed_syncs = self.driver.files.failed_syncs

        survived = self.driver.survive(lambda: self.driver.append(offers))

        asked = {offer.identity for offer in offers}
        assert not outcomes.acked & outcomes.refused
        assert outcomes.acked | outcomes.refused <= asked
        self.acked |= outcomes.acked
        self.never |= outcomes.refused
        if self.driver.files.failed_syncs > failed_syncs:
            self.unsure |= outcomes.refused
        self.open -= outcomes.acked | outcomes.refused
        if survived:
            assert outcomes.acked | outcomes.refused == asked
        else:
            self.start_after(self.armed)

    def seal(self) -> None:
        """Seal, as far as the disk allows it."""
        self.attempt(self._seal)

    def _seal(self) -> None:
        self.driver.store.seal()
        self.sealed = self.acked - self.damaged

    def attempt(self, action: Callable[[], object]) -> None:
        """Do what a bad disk may refuse, and a crash cut short."""
        before = self.driver.files.fired

        def attempt() -> None:
            try:
                action()
            except (OSError, StoreError):
                failed = self.driver.files.fired > before or self.driver.has_failed or self.damaged
                assert failed, "it failed without a fault"

        if not self.driver.survive(attempt):
            self.start_after(self.armed)

    def stop_and_start(self) -> None:
        """Close the store, as far as the disk allows it, and open it."""

        def stop() -> None:
            with contextlib.suppress(OSError, StoreError):
                self.driver.stop()

        survived = self.driver.survive(stop)
        self.start_after(Crash("kill", 0) if survived else self.armed)

    def start_after(self, crash: Crash) -> None:
        """Start behind an end of any kind, and compare what is there with what was promised."""
        lossy = power = False
        while True:
            power = power or crash.mode == "power"
            lossy = power and not self.durable
            self._check_leftover(self.sealed if lossy else self.acked)
            started = self.driver.survive(self._start)
            if started:
                break
            crash = self.armed
        promised = self.sealed if lossy else self.acked
        seen = read_with_capd(self.driver.run)
        if lossy:
            self.damaged |= seen.damaged() - self.sealed
        if power:
            self._accept_order(seen)
        self.compare(seen, promised)
        self._check_committed(seen)
        present = set(seen.identities())
        self.never = self.offers.keys() - present
        self.open -= present | (self.open if lossy and not self.durable else set())
        self.acked = present
        self.sealed &= present
        self.unsure.clear()

    def _start(self) -> None:
        before = self.driver.files.fired
        try:
            self.driver.start()
        except (OSError, StoreError):
            assert self.driver.files.fired > before, "a start failed without a fault"
            self.driver.files.abandon()
            self.driver.files.calm()
            self.driver.start()

    # -- comparisons --------------------------------------------------------------------------------------

    def _check_leftover(self, promised: set[int]) -> None:
        """Before anything repairs it, a store shows right values, and plain readers never see a hole."""
        if self.driver.run.exists():
            self.check_values(read_with_capd(self.driver.run), by_moment=True)
            self.check_plain()

    def compare(self, seen: Seen, promised: set[int]) -> None:
        """What is there against what was promised, and what was refused."""
        self.check_values(seen, by_moment=True)
        found = seen.identities()
        assert len(found) == len(set(found)), f"records that are there twice: {found}"
        assert promised <= set(found) | self.damaged, f"promised and gone: {promised - set(found)}"
        unasked = self.never & set(found) - self.unsure
        if not self.driver.files.failed_syncs:  # what a disk that failed was told to forget may come back
            assert not unasked, f"refused or gone, and there: {unasked}"
        damaged = seen.damaged() - self.damaged - self._given_up()
        assert not damaged, f"{damaged} damaged: {seen.errors}"
        for path, records in seen.series.items():
            order = [self.order[record.identity] for record in records]
            assert order == sorted(order), f"{path} is out of order: {[r.identity for r in records]}"

    def _accept_order(self, seen: Seen) -> None:
        """A record whose COMMIT was lost with the power comes back from the log, behind those that came after it."""
        for records in seen.series.values():
            turns = sorted(self.order[record.identity] for record in records)
            self.order |= {record.identity: turn for record, turn in zip(records, turns, strict=True)}

    def _given_up(self) -> set[int]:
        """Refused records that a store which lost writes may show, unreadable, until the next start forgets them."""
        return self.never | self.open if self.driver.has_failed else set()

    def check_values(self, seen: Seen, *, by_moment: bool) -> None:
        """Nobody reads a wrong value. by_moment: the moments that records are known by are sound."""
        for found in seen.all():
            if found.bits is None:
                continue
            if by_moment:
                assert _is(found, self.offers[found.identity]), f"record {found.identity} is wrong"
            else:
                assert any(_is(found, offer) for offer in self.offers.values()), found

    def _check_committed(self, seen: Seen) -> None:
        present = set(seen.identities())
        for client in CLIENTS:
            ranges = self.driver.store.committed(client)
            said = {n for first, last in ranges for n in range(first, last + 1)}
            own = {n for n in present if self.offers[n].client == client}
            assert said == own, f"committed says {said}, there are {own}"

    def check_plain(self, *, complete: bool = False) -> None:
        """The same for a plain Zarr reader, who sees all that was sealed. complete: everything is."""
        seen = read_with_zarr(self.driver.run)
        self.check_values(seen, by_moment=True)
        found = seen.identities()
        assert len(found) == len(set(found))
        assert set(found) <= self.acked | self.open | self.unsure
        damaged = seen.damaged() - self.damaged - self._given_up()
        assert not damaged, f"{damaged} damaged: {seen.errors}"
        missing = (self.acked if complete else self.sealed) - set(found)
        assert not missing, f"sealed, and plain readers do not see them: {missing}"
        assert not (complete and seen.errors), seen.errors


def _is(found: Found, offer: Offer) -> bool:
    bits = found.bits
    assert bits is not None
    return (found.key, found.dtype, bits.dtype, bits.shape, bits.tobytes()) == (
        offer.key,
        offer.dtype,
        offer.kept.dtype,
        offer.kept.shape,
        offer.kept.tobytes(),
    )
