"""The state of a collection run, beside the run in the store: a second start continues where the first ended.

`NAME.collection/` holds `state.json`, the report, and of each try of a type `runs/TYPE/`, its own directory, and
`logs/TYPE.log`. Files are this user's alone.
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
from capd.output_directory import held
from capd.store.documents.names import component

__all__ = [
    "CollectionState",
    "TypeState",
    "alone",
    "directory_of",
    "load",
    "save",
    "tried",
    "unfinished",
    "write_text",
]

STATE_NAME = "state.json"
_SUFFIX = ".collection"
_MAX_STATE_NBYTES = 1 << 20


class _StateModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TypeState(_StateModel):
    """One quant type. outcome: None before its first try, and when a try was cut off by the end of `capd run` itself.

    tries: begun until now. records: kept in the last one. emulation: the recipe by which the job computed, none where
    the type is a label.
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
        """Count a try, of which nothing is known yet."""
        self.tries += 1
        self.outcome = self.exit_code = None
        self.micro_batches = self.records = 0
        self.emulation = "none"

    @property
    def collected(self) -> bool:
        """Whether it needs no further try."""
        return self.outcome in COLLECTED


class CollectionState(_StateModel):
    """A collection run."""

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
        """Whether a request wants the same micro-batches."""
        return (self.control_iter, self.collect_micro_batches) == (
            request.micro_batches,
            request.per_iteration,
        )


def directory_of(store: Path, run_id: str) -> Path:
    """The directory of a run's collection."""
    return store / f"{run_id}{_SUFFIX}"


def load(directory: Path, run_id: str, request: CollectionRequest, command: Sequence[str]) -> CollectionState:
    """The state to go on from: what is there, with types that are new, or a new one.

    Raises ConfigError where the run was collected with other numbers, StoreError for a file that cannot be read.
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
            f"{before.collect_micro_batches}; say the same to continue it, or choose another --run-id"
        )
    known = {one.quant_type for one in before.types}
    types = [TypeState(quant_type=name) for name in request.types if name not in known]
    return before.model_copy(update={"command": list(command), "types": [*before.types, *types]})


def unfinished(store: Path, request: CollectionRequest, command: Sequence[str]) -> str | None:
    """The run of the newest collection of the store that was begun with the same request and command and not ended."""
    places = sorted(store.glob(f"*{_SUFFIX}/{STATE_NAME}"), key=lambda path: path.stat().st_mtime_ns)
    for place in reversed(places):
        try:
            found = _read(place.parent)
        except StoreError:
            continue  # of another version, perhaps
        if (
            found is not None
            and not found.finished
            and found.asks_for(request)
            and found.command == list(command)
            and tuple(one.quant_type for one in found.types) == request.types
        ):
            return found.run_id
    return None


def alone(directory: Path) -> AbstractContextManager[None]:
    """Inside, this process is the only one that collects there. Raises StoreBusy where another does."""
    busy = (
        f"{directory.stem} is being collected by another `capd run`; wait for it, or choose another --run-id"
    )
    return held(directory, busy)


def tried(directory: Path, one: TypeState) -> tuple[Path, Path]:
    """Directory and log of a type's present try; the first one has the type's name, later ones a number, too."""
    name = component(one.quant_type) + (f"~{one.tries}" if one.tries > 1 else "")
    return directory / "runs" / name, directory / "logs" / f"{name}.log"


def save(directory: Path, state: CollectionState) -> None:
    """Replace the state."""
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
        raise StoreError(f"{path} cannot be read ({what}); move it away to begin anew") from None
