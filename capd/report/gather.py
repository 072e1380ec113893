"""Looks at every item once and merges what it sees into groups; a few threads read, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from capd.analyze.distribution import distribution_of
from capd.analyze.groups import FIELDS, MOMENT_FIELDS, Fields, Groups, Tally
from capd.errors import CapdError
from capd.io.ahead import AHEAD_NBYTES, ahead
from capd.io.items import Item
from capd.store.statistics import merge_stats, public, summarise
from capd_client.key import Key
from capd_client.texts import printable

__all__ = [
    "BY_LAYER", "BY_RANK", "BY_SAMPLE", "BY_TENSOR", "BY_TYPE_AND_LAYER", "GROUPINGS", "Gathered", "Skipped", "gather",
]  # fmt: skip

BY_TENSOR: Fields = ("quant_type", "tensor_name")
BY_TYPE_AND_LAYER: Fields = ("quant_type", "layer")
BY_LAYER: Fields = ("quant_type", "tensor_name", "layer")
BY_SAMPLE: Fields = ("quant_type", "layer", "sample_idx")
BY_RANK: Fields = ("quant_type", "layer", "rank")
# With their distributions, but for those that may be very many, or that nobody asks for.
GROUPINGS: dict[Fields, bool] = {
    (): True,
    **{(name,): name != "iteration" for name in FIELDS},
    BY_TENSOR: True,
    BY_TYPE_AND_LAYER: False,
    BY_LAYER: False,
    BY_SAMPLE: True,
    BY_RANK: True,
}
_OF_MOMENTS = [fields for fields in GROUPINGS if set(fields) & set(MOMENT_FIELDS)]
_OF_KEYS = [fields for fields in GROUPINGS if not set(fields) & set(MOMENT_FIELDS)]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A record or file that could not be read, and why."""

    name: str
    reason: str


@dataclass
class Gathered:
    """What was seen. without_statistics: records whose values were left out, as nothing was stored of them but the
    elements, and these were not to be read."""

    groups: Groups = field(default_factory=lambda: Groups(GROUPINGS))
    skipped: list[Skipped] = field(default_factory=list)
    without_statistics: int = 0


@dataclass(frozen=True, slots=True)
class _Seen:
    key: Key
    sample_idx: int | None
    iteration: int
    tally: Tally
    has_statistics: bool = True


def gather(
    items: Iterable[Item], gathered: Gathered, *, threads: int, quick: bool
) -> Iterator[Skipped | int]:
    """Add all items to `gathered`; of each, in order, yields its bytes once it is seen, or why it was skipped.

    quick: stored statistics alone, no element of a run is read. About 128 MiB of items are in memory at once, or one
    item where that is larger. All are added when the iterator ends.
    """
    adding = _Adding(gathered)
    with ThreadPoolExecutor(threads, thread_name_prefix="capd-report") as pool:

        def begin(item: Item) -> Future[_Seen | Skipped | None]:
            return pool.submit(_look, item, quick)

        try:
            for item, future in ahead(items, begin, lambda item: item.nbytes, AHEAD_NBYTES):
                seen = future.result()
                if isinstance(seen, _Seen):
                    adding.add(seen)
                elif seen is not None:
                    gathered.skipped.append(seen)
                yield seen if isinstance(seen, Skipped) else item.nbytes
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    adding.end_key()


def _look(item: Item, quick: bool) -> _Seen | Skipped | None:
    try:
        loaded = item.load()
        if loaded is None:
            return None
        stats, distribution = loaded.stats, None
        if loaded.read is not None and not quick:
            bits = loaded.read()
            distribution = distribution_of(bits, loaded.dtype)
            stats = stats or public(summarise(bits, loaded.dtype))
    except (CapdError, OSError, RuntimeError, MemoryError) as error:  # damage; or torch, which lacks memory
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return Skipped(item.name, printable(reason[:500]))
    tally = Tally(1, loaded.raw_bytes, stats or merge_stats(()), distribution)
    return _Seen(loaded.key, loaded.sample_idx, loaded.iteration, tally, stats is not None)


class _Adding:
    """Adds what is seen; to the groups of keys alone only once for neighbours of one key."""

    def __init__(self, gathered: Gathered) -> None:
        self._gathered, self._groups = gathered, gathered.groups
        self._key: Key | None = None
        self._tally = Tally()

    def add(self, seen: _Seen) -> None:
        if seen.key != self._key:
            self.end_key()
            self._key = seen.key
        self._tally.add(seen.tally)
        for fields in _OF_MOMENTS:
            of_moment = {"sample_idx": seen.sample_idx, "iteration": seen.iteration}
            values = [of_moment[name] if name in of_moment else getattr(seen.key, name) for name in fields]
            self._groups.add(fields, values, seen.tally)
        self._gathered.without_statistics += not seen.has_statistics

    def end_key(self) -> None:
        for fields in _OF_KEYS if self._key is not None else ():
            self._groups.add(fields, [getattr(self._key, name) for name in fields], self._tally)
        self._key, self._tally = None, Tally()
