"""The shard files of a series during a repair: open ones, sealed ones, and moved ones, which are brought back.

One shard is brought back at a time, so that its records are saved like those that are here.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from capd.errors import CapdError, ObjectStoreError, StoreError
from capd.store.format.frames import UNKNOWN_CLIENT, RecordRow, SeriesHeader
from capd.store.objects.bucket import Bucket
from capd.store.recover.salvage import Salvaged, ShardSource
from capd.store.scan.moved_shard import MovedShard

__all__ = ["SeriesShards"]


class SeriesShards:
    """The shard files of one series, open and sealed. The files of one shard number are open at a time.

    A moved shard is brought back into the file `scratch` for this time.
    """

    def __init__(
        self,
        header: SeriesHeader,
        partials: dict[int, Path],
        sealed: dict[int, Path],
        published: int,
        moved: dict[int, MovedShard],
        scratch: Path,
    ) -> None:
        self._header, self._number = header, -1
        self._moved, self._scratch = moved, scratch
        # A shared chunk of a sealed shard has zeros in place of records that are not published.
        self._places = ((partials, 0), (sealed, published))
        self._sources: list[tuple[ShardSource, int]] = []
        self._files = contextlib.ExitStack()

    def __enter__(self) -> SeriesShards:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def take(self, number: int, row: RecordRow) -> Salvaged | None:
        """Return the elements of a record from the first intact copy; None if there is none."""
        shard = number // self._header.geometry.shard_records
        if shard != self._number:
            self._close()
            self._number = shard
            is_back = shard in self._moved and _brought_back(self._moved[shard], self._scratch)
            for files, published in self._places:
                if is_back and files is self._places[1][0]:
                    files = {shard: self._scratch}
                with contextlib.suppress(KeyError, OSError):
                    source = self._files.enter_context(ShardSource(files[shard], self._header, shard))
                    self._sources.append((source, published))
        for source, published in self._sources:
            if number in source.scanned.rows or number < published:
                taken = source.take(number, row)
                if taken is not None:
                    return taken
        return None

    def named(self, number: int, row: RecordRow) -> RecordRow:
        """Return the row of a record that was taken, with its client if only the moved shard names it."""
        if row.client == UNKNOWN_CLIENT and number // self._header.geometry.shard_records in self._moved:
            found = (source.scanned.rows.get(number) for source, _ in self._sources)
            return next((one for one in found if one is not None and one.shape == row.shape), row)
        return row

    def _close(self) -> None:
        self._files.close()
        self._sources.clear()
        self._scratch.unlink(missing_ok=True)


def _brought_back(moved: MovedShard, place: Path) -> bool:
    """Write the object of a moved shard into a file. Damage in it is left to the reader.

    Args:
        moved: The shard.
        place: The file.

    Returns:
        Whether there is such an object.

    Raises:
        StoreError: The object store does not answer, so nobody knows whether the records are lost.
    """
    try:
        with place.open("wb") as file:
            Bucket(moved.to, is_new=False).get_into(moved.key, file, at_most=moved.nbytes)
    except FileNotFoundError:
        return False
    except CapdError as error:
        raise StoreError(
            f"cannot bring back the shard that was moved to {moved.address}: {error}",
            retry=isinstance(error, ObjectStoreError) and error.retry,
        ) from error
    return True
