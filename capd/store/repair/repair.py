"""Saves the readable records of a damaged run into a new run. The damaged run is only read.

Intact records are committed to the new run through a `RunStore`, in the old order and with new, dense numbers. Other
records are listed. The new run is built in a temporary directory, and appears under its name when it is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from capd.errors import ConfigError, DamagedRecord, StoreBusy, StoreError, StoreFull
from capd.space import if_full, mount_of, shown_size
from capd.store.alerts.alert import Alert
from capd.store.alerts.file import alerts_path, read_alerts, write_alerts
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.disk.files import make_directory, remove_tree, rename, sync_paths
from capd.store.disk.layout import nodes_of, series_on_disk
from capd.store.keeps.file import keeps_path, read_keeps, write_keeps
from capd.store.keeps.keep import Keep
from capd.store.repair.node import DamagedNode
from capd.store.repair.result import Repair
from capd.store.run.options import StoreOptions
from capd.store.run.run_store import RunStore
from capd.store.scan.published import read_published
from capd.store.scan.survey import shard_files
from capd.store.verify.run import run_identity

__all__ = ["repair"]


def repair(run: Path, new: Path, *, progress: Callable[[int], None] | None = None) -> Repair:
    """Create the run `new` from all readable records of `run`. The path `new` does not exist before it is complete.

    Args:
        run: The damaged run. No daemon may write to it.
        new: The path of the new run, which ends in `.zarr`.
        progress: A function that is called with the bytes saved so far, uncompressed.

    Raises:
        ConfigError: `new` cannot be the name of a new run, already exists, or is inside `run`.
        NotAStore: `run` is not a run.
        StoreFull: The file system of `new` is full.
        StoreError: The new run cannot be written.
    """
    run_identity(run)
    _check_place(run, new)
    done = Repair(run, new)
    try:
        make_directory(new.parent)
        with _building(new) as root:
            saved: set[str] = set()
            for node in _writers(run):
                with DamagedNode(run, node, root, done, progress) as part:
                    saved |= part.save()
            done.unknown += [p for p in series_on_disk(run) if p not in saved and shard_files(run / p)]
            write_alerts(root / new.name, _sound_alerts(run))
            write_keeps(root / new.name, _sound_keeps(run))
            # If no node wrote to the run, the new run is empty.
            if not (root / new.name).exists():
                RunStore(root, new.stem, "node0", StoreOptions()).close()
            rename(root / new.name, new)
            sync_paths([new, new.parent], new.parent)
    except OSError as error:
        full = if_full(error, new)
        raise full if full is not error else StoreError(f"cannot write {new}: {error.strerror}") from error
    return done


def _sound_alerts(run: Path) -> dict[str, list[Alert]]:
    found = {}
    for node in nodes_of(run):
        with contextlib.suppress(StoreError, OSError):
            found[node] = read_alerts(alerts_path(run, node)).items
    return found


def _sound_keeps(run: Path) -> dict[str, list[Keep]]:
    found = {}
    for node in nodes_of(run):
        with contextlib.suppress(StoreError, OSError):
            found[node] = read_keeps(keeps_path(run, node)).items
    return found


def _check_place(run: Path, new: Path) -> None:
    if new.suffix != ".zarr":
        raise ConfigError(f"{new} cannot be the name of a run; give -o a path that ends in .zarr")
    if os.path.lexists(new):
        raise ConfigError(f"{new} exists already; give -o the path of a new run")
    if new.resolve().is_relative_to(run.resolve()):
        raise ConfigError(f"{new} is inside {run}, which must not change; give -o a path outside of it")
    place = mount_of(new)
    found = os.statvfs(place)
    free, needed = found.f_bavail * found.f_frsize, _nbytes(run)
    if needed > free:
        raise StoreFull(
            f"{new} may need {shown_size(needed)}, the file system {place} has {shown_size(free)} free; "
            "make room there, or give -o a path on another file system"
        )


def _nbytes(run: Path) -> int:
    """Return the bytes of all files that hold records. The stub of a moved shard has the size of the shard."""
    total = 0
    for pattern in ("*/rank*/layer*/*/*/data/c/**/*", ".capd/node=*/spool/*", f".capd/node=*/{CATALOG_NAME}"):
        total += sum(path.stat().st_size for path in run.glob(pattern) if path.is_file())
    return total


@contextlib.contextmanager
def _building(new: Path) -> Iterator[Path]:
    """Create a temporary directory next to `new`. Raises StoreBusy while another repair creates the same run."""
    root = new.with_name(f".{new.name}.repair")
    root.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreBusy(
                f"another repair is writing {new}; wait for it, or give -o another path"
            ) from None
        try:
            # A killed repair may have left files.
            for left in root.iterdir():
                remove_tree(left)
            yield root
        finally:
            remove_tree(root)
    finally:
        os.close(lock)


def _writers(run: Path) -> list[str]:
    """Return the nodes that wrote to the run, by its directories and by the metadata of its series."""
    found = set(nodes_of(run))
    for path in series_on_disk(run):
        with contextlib.suppress(DamagedRecord):
            found.add(read_published(run / path).node)
    return sorted(found - {""})
