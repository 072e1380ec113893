"""`capd run --mode single|batch|quick`: a job for each quant type, until it has what was asked for."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capd.cli.collected_job import CollectedJob, last_lines
from capd.cli.collection_daemon import (
    LAST_REPLY_S,
    WATCH_REPLY_S,
    Counted,
    before,
    counted,
    flush,
    next_attempt,
    seen,
    why_full,
)
from capd.cli.collection_progress import Progress, progress_text
from capd.cli.companion import Companion, join, start
from capd.cli.display import Display
from capd.cli.emulation import Choice
from capd.cli.job_settings import job_environment
from capd.cli.output import note
from capd.cli.startup import Startup
from capd.collect.placeholders import Filled
from capd.collect.request import Request
from capd.collect.state import CollectionState, TypeState, save, tried, write_text
from capd.collect.watching import Ending, Look, Watcher
from capd.store.files import make_directory
from capd_client.config import ClientConfig
from capd_client.process_documents import left
from capd_client.quota import Collected

if TYPE_CHECKING:
    from capd.cli.run import Place

__all__ = ["RULES", "Collection"]

RULES = """\
# What a collection run captures: everything that the predecessor did. The second rule adds the backward's results.
[[rule]]
name = "collection"

[[rule]]
name = "backward post"
tensors = ["grad_input", "grad_weight"]
"""

_LOOK_S = 0.25


class Collection:
    """All types of one collection run, whose state in `directory` is kept up to date.

    commands: one for each type of the state. choices: what each is to compute in. flags, file: the job's settings
    as `job_environment` takes them. job: the same, resolved.
    """

    def __init__(
        self,
        request: Request,
        state: CollectionState,
        directory: Path,
        commands: Mapping[str, Filled],
        choices: Mapping[str, Choice],
        place: Place,
        flags: Mapping[str, str],
        file: Mapping[str, Any],
        job: ClientConfig,
    ) -> None:
        self._request, self._state, self._directory = request, state, directory
        self._commands, self._choices, self._place = commands, choices, place
        self._flags, self._file, self._job = flags, file, job
        self._display = Display()
        self._printed: int | None = None  # of the job's log, when it was asked to end

    def run(self) -> None:
        """Collect every type that is not collected yet."""
        write_text(self._directory / "rules.toml", RULES)
        for number, one in enumerate(self._state.types, 1):
            if one.quant_type not in self._commands:
                continue
            if one.collected:
                note(f"{one.quant_type} is collected already: {one.records:,} records")
                continue
            self._printed = None
            where = f"{number} of {len(self._state.types)}"
            note(f"collecting {one.quant_type}, {where} ({self._choices[one.quant_type].text})")
            self._collect(one)
            note(f"{one.quant_type}: {one.outcome}, {one.reason}")
            if not one.collected:
                self._show_log(one)

    def _collect(self, one: TypeState) -> None:
        one.begin_try()
        log = tried(self._directory, one)[1]
        one.log = str(log)
        began = time.monotonic()
        ending = Ending("interrupted", "capd run itself was ended, or could not go on")
        emulate = self._choices[one.quant_type].recipe != "none"
        startup = Startup(self._job.watch, replace=self._job.replace_tensor_saver, emulate=emulate)
        try:
            for path in (self._commands[one.quant_type].run_dir, log.parent):
                make_directory(path)
            self._save()
            with self._companion() as companion, startup, _documents() as documents:
                environ = self._environment(one, companion, documents)
                startup.put_into(environ)
                ending = self._run_job(one, companion, startup, environ, documents, log)
        except OSError as error:  # a full disk, above all
            ending = Ending("failed", f"{error.strerror or error} ({error.filename or self._directory})")
        finally:
            one.outcome, one.reason = ending.outcome, ending.reason
            one.seconds = round(time.monotonic() - began, 3)
            self._save()

    def _save(self) -> None:
        try:
            save(self._directory, self._state)
        except OSError as error:
            note(f"how far the collection is cannot be saved in {self._directory}: {error.strerror or error}")

    def _companion(self) -> Companion:
        endpoint, store, run_id, config, _ = self._place
        return join(endpoint, run_id) if endpoint else start(store, run_id, config)

    def _environment(self, one: TypeState, companion: Companion, documents: Path) -> dict[str, str]:
        """The job's environment: that of `capd run`, the type, and how much of it is kept."""
        given = {**os.environ, **self._commands[one.quant_type].variables}
        environ = job_environment(given, companion, self._flags, self._file)
        if not environ.get("CAPD_STEPS") and "when.steps" not in self._file:
            environ["CAPD_STEPS"] = "all"
        if not environ.get("CAPD_SELECT") and "rule" not in self._file:
            environ["CAPD_SELECT"] = str(self._directory / "rules.toml")
        environ |= {
            "CAPD_COLLECT": self._request.quota,
            "CAPD_COLLECT_DIR": str(documents),
            "CAPD_QUANT_TYPE": one.quant_type,
            "CAPD_EMULATE": self._choices[one.quant_type].recipe,
            # What scripts of the predecessor look at, too.
            "CUSTOM_QUANT_TYPE": one.quant_type,
            "TENSOR_SAVE_ENABLED": "true",
            "CONTROL_ITER": str(self._request.micro_batches),
            "COLLECT_MICRO_BATCHES": str(self._request.per_iteration),
        }
        if one.tries > 1:
            environ["CAPD_ATTEMPT"] = str(next_attempt(companion))
        environ.setdefault("PYTHONUNBUFFERED", "1")  # the last lines of a job that is killed
        return environ

    def _run_job(
        self,
        one: TypeState,
        companion: Companion,
        startup: Startup,
        environ: dict[str, str],
        documents: Path,
        log: Path,
    ) -> Ending:
        if companion.store is None:
            return Ending("daemon", f"none answers at {companion.endpoint}, so the job was not started")
        held = before(companion)
        watcher = Watcher(self._request, time.monotonic())
        filled = self._commands[one.quant_type]
        mark = f"CAPD_COLLECT_DIR={documents}"
        with CollectedJob(filled.command, environ, mark=mark, log=log, display=self._display) as job:
            try:
                job.start()
            except OSError as error:
                one.exit_code = 126
                return Ending("failed", f"{filled.command[0]} cannot be executed: {error.strerror or error}")
            ending = self._watch_job(one, job, companion, documents, watcher, held)
            if ending is not None:
                self._printed = job.logged_nbytes()  # its last words are about its being ended
                flush(companion, left(documents, Collected))
        companion.finish(startup.why_nothing)
        told = startup.emulation()
        one.emulation = told.text
        for line in told.lines():
            note(line)
        found = seen(companion, LAST_REPLY_S)
        got = counted(found).since(held)
        code = job.process.returncode
        if ending is None:
            one.exit_code = code if code >= 0 else 128 - code
        if found is not None:
            one.records = got.records
        look = Look(
            time.monotonic(), left(documents, Collected), one.records, lost=got.lost,
            disk_full=got.disk_full > 0, why_full=why_full(found), daemon_ended=found is None,
        )  # fmt: skip
        ending = watcher.over(look, ending, one.exit_code or 0)
        one.micro_batches = watcher.kept
        return ending

    def _watch_job(
        self,
        one: TypeState,
        job: CollectedJob,
        companion: Companion,
        documents: Path,
        watcher: Watcher,
        held: Counted,
    ) -> Ending | None:
        """Why the job is to be ended; None when it has ended by itself."""
        began, expected = time.monotonic(), self._expected()
        while job.process.poll() is None:
            found, now = seen(companion, WATCH_REPLY_S), time.monotonic()
            got = counted(found).since(held)
            if found is not None:
                one.records = got.records
            look = Look(
                now,
                left(documents, Collected),
                one.records,
                disk_full=got.disk_full > 0,
                why_full=why_full(found),
                daemon_ended=companion.process is not None and companion.process.poll() is not None,
            )
            ending = watcher.look(look)
            if ending is not None:
                return ending
            progress = Progress(one.quant_type, watcher.kept, one.records, expected, now - began)
            self._display.progress(progress_text(progress, self._request, found))
            time.sleep(_LOOK_S)
        return None

    def _expected(self) -> int | None:
        """The records that a type should give: as many as one that is complete; None before there is one."""
        return next((one.records for one in self._state.types if one.outcome == "complete"), None)

    def _show_log(self, one: TypeState) -> None:
        lines = last_lines(Path(one.log), nbytes=self._printed)
        if lines:
            note(f"the last {len(lines)} lines of {one.log}:")
        for line in lines:
            note(f"  {line}")


@contextmanager
def _documents() -> Iterator[Path]:
    """Where the processes of a job say how far they are: this user's alone, and gone afterwards."""
    made = Path(tempfile.mkdtemp(prefix="capd-collect-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
