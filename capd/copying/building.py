"""The building of a new run: in a hidden directory beside it, so that the run appears only when it is complete.

A killed command leaves the directory. The same command continues there; another one is refused.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from capd.errors import ConfigError, StoreError
from capd.output_directory import directory_lock
from capd.space import if_full
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import make_directory, remove_tree, rename, sync_paths, write_file
from capd.store.verify.run import verify_run

__all__ = ["Building", "building"]

_ORDER = "order.json"
# It names the inode of the complete run. A rename keeps the inode, so a directory of another origin is told apart.
_COMPLETE = "complete"


class Building:
    """A run that is being built.

    Attributes:
        new: The path that the run gets.
        root: The hidden directory. It is a store root with this run alone.
        is_published: Whether an earlier command has completed the run.
    """

    def __init__(self, new: Path, root: Path, *, is_published: bool) -> None:
        self.new, self.root, self.is_published = new, root, is_published

    @property
    def run(self) -> Path:
        """The run, as long as it is built."""
        return self.root / self.new.name

    def publish(self, records: int | None = None) -> None:
        """Check every byte of the run, and give it its name.

        Args:
            records: The records that it must have, errors of formats among them; None for a copy of files.

        Raises:
            StoreError: The run is damaged, or the name was taken in the meantime.
            OSError: The disk refused.
        """
        report = verify_run(self.run)
        if not report.ok:
            raise StoreError(
                f"the copy is damaged: {report.damaged[0]}; check the source with `capd verify`, and the disk"
            )
        held = report.records + report.error_records
        if records is not None and held != records:
            # Records whose client is unknown, because their shard lost a COMMIT, cannot be told apart after a kill.
            raise StoreError(
                f"the copy holds {held} records, not the {records} of its source; delete {self.root}, "
                "and give the command again"
            )
        failpoint("copy.after_verify")
        if os.path.lexists(self.new):
            raise StoreError(
                f"{self.new} was created in the meantime; move it away, and give the command again"
            )
        write_file(self.root / _COMPLETE, _inode(self.run))
        sync_paths([self.run, self.root / _COMPLETE, self.root], self.root)
        rename(self.run, self.new)
        sync_paths([self.new.parent, self.root], self.root)
        failpoint("copy.after_publish")


@contextlib.contextmanager
def building(new: Path, order: Mapping[str, Any]) -> Iterator[Building]:
    """Begin or continue to build a run. The hidden directory goes after a success.

    Args:
        new: The path of the new run, which ends in `.zarr`.
        order: The sources and options of the command. Only the same ones continue a killed command.

    Raises:
        ConfigError: `new` cannot be the name of a new run, or exists.
        StoreBusy: Another command builds the same run.
        StoreFull: The disk is full.
        StoreError: The directory cannot be used.
    """
    if new.suffix != ".zarr":
        raise ConfigError(f"{new} cannot be the name of a run; give a path that ends in .zarr")
    root = new.with_name(f".{new.name}.copy")
    note = root / _ORDER
    wanted = msgspec.json.encode(dict(order), order="sorted")
    if os.path.lexists(new) and not note.is_file():
        raise ConfigError(f"{new} exists already; give the path of a new run")
    place = new.parent.resolve()
    for above in (place, *place.parents):
        if (above / "zarr.json").is_file():
            raise ConfigError(
                f"{new} lies inside of {above}, which is a run already; give a path outside of it"
            )
    try:
        make_directory(new.parent)
        root.mkdir(mode=0o700, exist_ok=True)
        with directory_lock(root, f"another command is writing {new}; wait for it, or give another path"):
            _check_order(root, note, wanted)
            built = Building(new, root, is_published=_is_published(new, root))
            if os.path.lexists(new) and not built.is_published:
                raise ConfigError(f"{new} exists already; move it away, or delete {root}")
            yield built
            remove_tree(root)
            sync_paths([root.parent], root.parent)
    except OSError as error:
        full = if_full(error, new.parent)
        raise full if full is not error else StoreError(f"cannot write {new}: {error.strerror}") from error


def _inode(run: Path) -> bytes:
    return b"%d" % run.lstat().st_ino


def _is_published(new: Path, root: Path) -> bool:
    complete = root / _COMPLETE
    return os.path.lexists(new) and complete.is_file() and complete.read_bytes() == _inode(new)


def _check_order(root: Path, note: Path, wanted: bytes) -> None:
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(f"{root} is a link, or belongs to another user; move it away, or give another path")
    if note.is_file():
        if note.read_bytes() != wanted:
            raise ConfigError(
                f"{root} holds a copy that was begun with other sources or options; give those again, or delete it"
            )
        return
    temporary = root / f"{_ORDER}.tmp"
    # A killed command may have left a part of it, and nothing else.
    if set(os.listdir(root)) - {temporary.name}:
        raise ConfigError(f"{root} holds files that are not of a copy; move it away, or give another path")
    write_file(temporary, wanted)
    sync_paths([temporary], root)
    rename(temporary, note)
    sync_paths([root], root)
