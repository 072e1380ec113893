"""The variables that `capd run` puts into a job's environment to find its models, and the notes that come back.

A directory at the head of PYTHONPATH makes every Python of the job start with capd_client/bootstrap/sitecustomize.py.
Each process notes its progress in one file. The notes explain why nothing was captured, if that happens.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import TracebackType

import capd_client
from capd.cli.jobs.emulation import EmulationNotes, read_notes

__all__ = ["BOOTSTRAP", "Startup"]

BOOTSTRAP = Path(capd_client.__file__).absolute().parent / "bootstrap"
_MAX_NOTES_NBYTES = 1 << 20


class Startup:
    """A context manager. Inside it, processes of the job may note their progress."""

    def __init__(self, watch: str, *, replace: bool = False, emulate: bool = False) -> None:
        """Prepare the notes.

        Args:
            watch: The setting `watch`: auto or off.
            replace: Whether to replace tensor_saver's module. The job's calls of it then say what is captured.
            emulate: Whether the models of the job must compute in another number format.
        """
        self._watch = watch
        self._replace = replace
        self._emulate = emulate
        self._notes: Path | None = None

    def __enter__(self) -> Startup:
        if self._watch != "off" or self._replace or self._emulate:
            descriptor, name = tempfile.mkstemp(prefix="capd-run-", suffix=".notes")
            os.close(descriptor)
            self._notes = Path(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._notes is not None:
            self._notes.unlink(missing_ok=True)

    def put_into(self, environ: dict[str, str]) -> None:
        """Add the variables by which a Python process of the job finds the start-up file, if they are needed."""
        if self._notes is None:
            return
        before = environ.get("PYTHONPATH", "")
        parts = [part for part in before.split(os.pathsep) if part != str(BOOTSTRAP)]
        # Python reads an empty entry as the working directory, so we must not add one.
        environ["PYTHONPATH"] = os.pathsep.join([str(BOOTSTRAP), *parts] if before else [str(BOOTSTRAP)])
        environ["CAPD_RUN_NOTES"] = str(self._notes)

    def emulation(self) -> EmulationNotes:
        """Return the outcome of the emulation that was requested, an empty one if none was requested."""
        if not self._emulate:
            return EmulationNotes()
        notes = self._read()
        missing = next((meaning for passed, meaning in _STAGES if passed not in notes), "")
        return read_notes(notes, missing or "no model was found, and none is watched")

    def why_nothing(self, connected: bool) -> str:
        """Return why the job has captured nothing, from the notes of its processes.

        `connected` says whether some rank was connected.
        """
        notes = self._read()
        if connected and ("empty" not in notes or "watched" in notes):
            return (
                "no step was reached that --steps, CAPD_STEPS, [when] or watch(steps=...) selects, or the watched "
                "models hold nothing that is selected: see the job's log"
            )
        if self._watch == "off" and not self._replace:
            return "the job calls neither capd_client.watch nor capture, and watch is off (CAPD_WATCH)"
        problems = [line.removeprefix("problem ") for line in notes if line.startswith("problem ")]
        if problems:
            return problems[0]
        if self._replace and "python" in notes:
            return _REPLACED_UNUSED if "replaced" in notes else _REPLACED_NOWHERE
        for passed, meaning in _STAGES:
            if passed not in notes:
                return meaning
        return next(
            (meaning for seen, meaning in _SEEN if seen in notes), "no rank connected; see the job's log"
        )

    def _read(self) -> list[str]:
        if self._notes is None:
            return []
        try:
            with self._notes.open("rb") as file:
                return file.read(_MAX_NOTES_NBYTES).decode(errors="replace").splitlines()
        except OSError:
            return []


_REPLACED_NOWHERE = (
    "with CAPD_REPLACE_TENSOR_SAVER the job's calls say what is captured, but it never imported "
    "megatron.core.tensor_saver"
)
_REPLACED_UNUSED = (
    "the job imported megatron.core.tensor_saver, which capd replaced, but captured nothing with it: see "
    "its log"
)

_STAGES = (
    (
        "python",
        "no Python of the job read capd's start-up file (python -I, -E or -S, or a launcher that replaces "
        "PYTHONPATH); call capd_client.watch(model) in the script",
    ),
    ("torch", "no process of the job imported torch"),
    (
        "forward",
        "no training forward was seen: it needs a model in training mode, with parameters to train and with gradients "
        "enabled",
    ),
)

_SEEN = (
    (
        "empty",
        "the models that trained hold nothing that capd knows, or that the rules select (see the job's log); "
        "capd_client.capture() takes any tensor",
    ),
    (
        "own",
        "the job imports capd_client, so it must say what to capture, but it calls neither watch nor capture",
    ),
    ("off", "capture is off in the job's processes: see its log"),
)
