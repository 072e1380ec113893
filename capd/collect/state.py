"""The state of a collection run, next to the run in the store. A second start continues where the first ended.

`NAME.collection/` holds `state.json` and the report. For each try of a type it holds the try's directory
`runs/TYPE/` and its log `logs/TYPE.log`. Only this user can read the files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from capd.collect.request import CollectionMode, CollectionRequest
from capd.collect.watching import COLLECTED, Outcome
from capd.errors import ConfigError, StoreError
from capd.output_directory import directory_lock
from capd.store.documents.names import component

__all__ = [
    "CollectionState",
    "TypeState",
    "directory_of",
    "load",
    "locked",
    "paths_of_try",
    "save",
    "unfinished",
    "write_text",
]

STATE_NAME = "state.json"
_SUFFIX = ".collection"
_MAX_STATE_NBYTES = 1 << 20


class _StateModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TypeState(_StateModel):
    """The state of one quant type.

    Attributes:
        outcome: The outcome of the last try. None before the first try, and if `capd run` itself ended during a try.
        tries: The number of tries that were begun.
        records: The number of records that the last try kept.
        emulation: The recipe by which the job computed, "none" if the type is only a label.
    """

    quant_type: str
    outcome: Outcome | None = None
    reason: str = ""
    tries: int = 0
    exit_code: int | None = None
    seconds: float = 0.0
    micro_batches: int = 0
    records: int = 0
    log: str = ""
    emulation: str = "none"

    def begin_try(self) -> None:
        """Count a new try, and reset the results of the last one."""
        self.tries += 1
        self.outcome = self.exit_code = None
        self.micro_batches = self.records = 0
        self.emulation = "none"

    @property
    def collected(self) -> bool:
        """Whether the type needs no further try."""
        return self.outcome in COLLECTED


class CollectionState(_StateModel):
    """The state of a collection run."""

    version: int = 1
    run_id: str
    mode: CollectionMode
    control_iter: int
    collect_micro_batches: int
    command: list[str]
    types: list[TypeState]

    @property
    def finished(self) -> bool:
        """Whether every type is collected."""
        return all(one.collected for one in self.types)

    def asks_for(self, request: CollectionRequest) -> bool:
        """Return whether a request wants the same micro-batches."""
        return (self.control_iter, self.collect_micro_batches) == (
            request.micro_batches,
            request.per_iteration,
        )


def directory_of(store: Path, run_id: str) -> Path:
    """Return the directory of a run's collection."""
    return store / f"{run_id}{_SUFFIX}"


def load(directory: Path, run_id: str, request: CollectionRequest, command: Sequence[str]) -> CollectionState:
    """Return the state to continue from: the stored one with new types added, or a new one.

    Raises:
        ConfigError: If the run was collected with other numbers of micro-batches.
        StoreError: If the stored state cannot be read.
    """
    before = _read(directory)
    if before is None:
        before = CollectionState(
            run_id=run_id,
            mode=request.mode,
            control_iter=request.micro_batches,
            collect_micro_batches=request.per_iteration,
            command=[],
            types=[],
        )
    elif not before.asks_for(request):
        raise ConfigError(
            f"run {run_id} was collected with --control-iter {before.control_iter} --collect-micro-batches "
            f"{before.collect_micro_batches}; give the same numbers to continue it, or choose another --run-id"
        )
    known = {one.quant_type for one in before.types}
    types = [TypeState(quant_type=name) for name in request.types if name not in known]
    return before.model_copy(update={"command": list(command), "types": [*before.types, *types]})


def unfinished(store: Path, request: CollectionRequest, command: Sequence[str]) -> str | None:
    """Return the run of the newest unfinished collection in the store with the same request and command, or None."""
    places = sorted(store.glob(f"*{_SUFFIX}/{STATE_NAME}"), key=lambda path: path.stat().st_mtime_ns)
    for place in reversed(places):
        try:
            found = _read(place.parent)
        except StoreError:
            # The state may be from another version.
            continue
        if (
            found is not None
            and not found.finished
            and found.asks_for(request)
            and found.command == list(command)
            and tuple(one.quant_type for one in found.types) == request.types
        ):
            return found.run_id
    return None


def locked(directory: Path) -> AbstractContextManager[None]:
    """Lock the collection inside the block. Raises StoreBusy if another process collects there."""
    busy = (
        f"{directory.stem} is being collected by another `capd run`; wait for it, or choose another --run-id"
    )
    return directory_lock(directory, busy)


def paths_of_try(directory: Path, one: TypeState) -> tuple[Path, Path]:
    """Return the directory and the log of a type's current try. Tries after the first one have a number in the name."""
    name = component(one.quant_type) + (f"~{one.tries}" if one.tries > 1 else "")
    return directory / "runs" / name, directory / "logs" / f"{name}.log"


def save(directory: Path, state: CollectionState) -> None:
    """Replace the stored state."""
    write_text(directory / STATE_NAME, state.model_dump_json(indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file of the collection in one step."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _read(directory: Path) -> CollectionState | None:
    path = directory / STATE_NAME
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_STATE_NBYTES)
        return CollectionState.model_validate_json(content)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        what = error.errors()[0]["msg"]
        raise StoreError(f"{path} cannot be read ({what}); move it away to start a new collection") from None
