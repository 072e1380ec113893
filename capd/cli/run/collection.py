"""The loop of a collection run: one job for each quant type, until the type has the requested micro-batches."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from capd.cli.jobs.companion import Companion
from capd.cli.jobs.emulation import Choice
from capd.cli.jobs.place import Place
from capd.cli.jobs.settings import ResolvedJob, job_environment
from capd.cli.jobs.startup import Startup
from capd.cli.output import note
from capd.cli.run.collected_job import CollectedJob, last_lines
from capd.cli.run.collection_daemon import CollectedRun
from capd.cli.run.collection_terminal import Display, progress_text
from capd.collect.placeholders import Filled
from capd.collect.request import CollectionRequest
from capd.collect.state import CollectionState, TypeState, paths_of_try, save, write_text
from capd.collect.watching import Ending, Watcher
from capd.store.disk.files import make_directory

__all__ = ["RULES", "Collection", "TypeJob"]

TypeJob = tuple[Filled, Choice]
"""The command of a type with its variables, and the number format in which it computes."""

RULES = """\
# A collection run captures everything that tensor_saver did. The second rule adds the backward's results.
[[rule]]
name = "collection"

[[rule]]
name = "backward post"
tensors = ["grad_input", "grad_weight"]
"""

_LOOK_S = 0.25


class Collection:
    """All types of one collection run. It keeps the state in `directory` up to date."""

    def __init__(
        self,
        request: CollectionRequest,
        state: CollectionState,
        directory: Path,
        jobs: Mapping[str, TypeJob],
        place: Place,
        settings: ResolvedJob,
    ) -> None:
        """Prepare the collection. `jobs` has the job of each requested type."""
        self._request, self._state, self._directory = request, state, directory
        self._jobs, self._place, self._settings = jobs, place, settings
        self._display = Display()
        # The size of the job's log when the job was asked to end.
        self._printed: int | None = None

    def run(self) -> None:
        """Collect every type that is not collected yet."""
        write_text(self._directory / "rules.toml", RULES)
        for number, one in enumerate(self._state.types, 1):
            if one.quant_type not in self._jobs:
                continue
            if one.collected:
                note(f"{one.quant_type} is collected already: {one.records:,} records")
                continue
            self._printed = None
            where = f"{number} of {len(self._state.types)}"
            note(f"collecting {one.quant_type}, {where} ({self._jobs[one.quant_type][1].text})")
            self._collect(one)
            note(f"{one.quant_type}: {one.outcome}, {one.reason}")
            if not one.collected:
                self._show_log(one)

    def _collect(self, one: TypeState) -> None:
        one.begin_try()
        one.log = str(paths_of_try(self._directory, one)[1])
        began = time.monotonic()
        ending = Ending("interrupted", "capd run itself was ended, or could not continue")
        filled, choice = self._jobs[one.quant_type]
        job = self._settings.job
        startup = Startup(job.watch, replace=job.replace_tensor_saver, emulate=choice.recipe != "none")
        try:
            for path in (filled.run_dir, Path(one.log).parent):
                make_directory(path)
            self._save()
            with self._place.companion() as companion, startup, _documents() as documents:
                ending = self._run_job(one, companion, startup, Path(documents))
        except OSError as error:
            # Usually the disk is full.
            ending = Ending("failed", f"{error.strerror or error} ({error.filename or self._directory})")
        finally:
            one.outcome, one.reason = ending.outcome, ending.reason
            one.seconds = round(time.monotonic() - began, 3)
            self._save()

    def _save(self) -> None:
        try:
            save(self._directory, self._state)
        except OSError as error:
            note(f"the collection's progress cannot be saved in {self._directory}: {error.strerror or error}")

    def _environment(
        self, one: TypeState, companion: Companion, documents: Path, attempt: int
    ) -> dict[str, str]:
        """Return the environment that `capd run` makes, with the type and its limits."""
        filled, choice = self._jobs[one.quant_type]
        file = self._settings.file
        environ = job_environment({**os.environ, **filled.variables}, companion, self._settings.flags, file)
        if not environ.get("CAPD_STEPS") and "when.steps" not in file:
            environ["CAPD_STEPS"] = "all"
        if not environ.get("CAPD_SELECT") and "rule" not in file:
            environ["CAPD_SELECT"] = str(self._directory / "rules.toml")
        environ |= {
            "CAPD_COLLECT": self._request.quota,
            "CAPD_COLLECT_DIR": str(documents),
            "CAPD_QUANT_TYPE": one.quant_type,
            "CAPD_EMULATE": choice.recipe,
            # Scripts that were written for tensor_saver read these two variables.
            "CUSTOM_QUANT_TYPE": one.quant_type,
            "TENSOR_SAVE_ENABLED": "true",
            "CONTROL_ITER": str(self._request.micro_batches),
            "COLLECT_MICRO_BATCHES": str(self._request.per_iteration),
        }
        if one.tries > 1:
            environ["CAPD_ATTEMPT"] = str(attempt)
        # Without it the last lines of a killed job would be lost in its buffer.
        environ.setdefault("PYTHONUNBUFFERED", "1")
        return environ

    def _run_job(self, one: TypeState, companion: Companion, startup: Startup, documents: Path) -> Ending:
        if companion.store is None:
            return Ending("daemon", f"none answers at {companion.endpoint}, so the job was not started")
        run, watcher = CollectedRun(companion, documents), Watcher(self._request, time.monotonic())
        environ = self._environment(one, companion, documents, run.attempt)
        startup.put_into(environ)
        command, mark = self._jobs[one.quant_type][0].command, f"CAPD_COLLECT_DIR={documents}"
        with CollectedJob(command, environ, mark=mark, log=Path(one.log), display=self._display) as job:
            try:
                job.start()
            except OSError as error:
                one.exit_code = 126
                return Ending("failed", f"{command[0]} cannot be executed: {error.strerror or error}")
            asked = self._watch_job(one, job, run, watcher)
            if asked is not None:
                # Output after this point is about the end that was requested.
                self._printed = job.logged_nbytes()
                run.flush()
        companion.finish(startup.why_nothing)
        emulation = startup.emulation()
        one.emulation = emulation.text
        for line in emulation.lines():
            note(line)
        look = run.look(last=True)
        code = job.process.returncode
        if asked is None:
            one.exit_code = code if code >= 0 else 128 - code
        ending = watcher.over(look, asked, one.exit_code or 0)
        one.records, one.micro_batches = run.records, watcher.micro_batches
        return ending

    def _watch_job(
        self, one: TypeState, job: CollectedJob, run: CollectedRun, watcher: Watcher
    ) -> Ending | None:
        """Return the reason to end the job, None if it ended by itself."""
        began, expected = time.monotonic(), self._expected()
        while job.process.poll() is None:
            ending = watcher.look(run.look())
            one.records, one.micro_batches = run.records, watcher.micro_batches
            if ending is not None:
                return ending
            seconds = time.monotonic() - began
            self._display.progress(progress_text(one, self._request, run.view, expected, seconds))
            time.sleep(_LOOK_S)
        return None

    def _expected(self) -> int | None:
        """The number of records of a complete type, which each type should reach. None before there is one."""
        return next((one.records for one in self._state.types if one.outcome == "complete"), None)

    def _show_log(self, one: TypeState) -> None:
        lines = last_lines(Path(one.log), nbytes=self._printed)
        if lines:
            note(f"the last {len(lines)} lines of {one.log}:")
        for line in lines:
            note(f"  {line}")


def _documents() -> tempfile.TemporaryDirectory[str]:
    """A directory of this user where the job's processes write their progress. It is removed after the job."""
    return tempfile.TemporaryDirectory(prefix="capd-collect-", ignore_cleanup_errors=True)
