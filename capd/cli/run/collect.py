"""Collection runs of `capd run --mode single|batch|quick`: the checks before the start, and the report at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from capd.cli.jobs.companion import join
from capd.cli.jobs.emulation import choose
from capd.cli.jobs.foreground import find_command
from capd.cli.jobs.next_line import note_next
from capd.cli.jobs.place import Place
from capd.cli.jobs.report import note_undrawn, reported
from capd.cli.jobs.settings import ResolvedJob
from capd.cli.options import flag, option
from capd.cli.output import note, print_either
from capd.cli.run.collection import Collection, TypeJob
from capd.cli.signals import leaving_on_signals
from capd.cli.table import TextTables
from capd.collect.placeholders import fill, parse_variables, shared_places
from capd.collect.report import FIELDS
from capd.collect.request import MODES, CollectionRequest, make_request
from capd.collect.state import (
    CollectionState,
    TypeState,
    directory_of,
    load,
    locked,
    paths_of_try,
    unfinished,
    write_text,
)
from capd.collect.watching import Outcome
from capd.errors import ConfigError, EndpointError
from capd.strict_json import strict_json

__all__ = ["CollectionOptions", "collection_request", "run_collection"]

_EXIT_CODES: dict[Outcome | None, int] = {"nothing": 5, "full": 6}


# What a terminal may shorten in the report, and what it may leave out.
_NAMES = (*FIELDS, "why", "dropped of")
_SPARE = ("min", "max", "std", "mean", "inf", "nan", "zero", "tries", "exit code", "time")
# The heading of these options in docs/cli.md.
_HEADING = {"rich_help_panel": "Collections"}


@dataclass(frozen=True)
class CollectionOptions:
    """The options of `capd run` for collections only."""

    control_iter: Annotated[
        int | None,
        option(
            "--control-iter",
            "N",
            "Micro-batches to keep of each type; 0: all, within a byte budget [default: 1].",
            "--control-micro-batches",
            min=0,
            **_HEADING,
        ),
    ] = None
    collect_micro_batches: Annotated[
        int | None,
        option(
            "--collect-micro-batches",
            "M",
            "Micro-batches of one iteration, at most [default: 1].",
            min=1,
            **_HEADING,
        ),
    ] = None
    until: Annotated[
        str | None,
        option(
            "--until",
            "complete|stable",
            "End a job when every rank has its micro-batches, or also when no more arrive [default: complete].",
            **_HEADING,
        ),
    ] = None
    stable_for: Annotated[
        str | None,
        option(
            "--stable-for",
            "TIME",
            "How long to wait for more, or for ranks without captures: 90, 60s, 15m, 1.5h [default: 60s].",
            **_HEADING,
        ),
    ] = None
    timeout: Annotated[
        str | None,
        option(
            "--timeout",
            "TIME",
            "End a type's job then, and do not count it as collected; 0: never [default: 15m].",
            **_HEADING,
        ),
    ] = None
    env: Annotated[
        list[str] | None,
        option("--env", "K=V", "A variable of the job. May be given several times.", **_HEADING),
    ] = None
    require: Annotated[
        list[str] | None,
        option(
            "--require",
            "PATH",
            "Data that must exist before anything starts: a file, a directory, or a prefix with .bin and .idx. May be "
            "given several times.",
            **_HEADING,
        ),
    ] = None
    yes: Annotated[bool, flag("--yes", "Allow --control-iter 0 without a byte budget.", **_HEADING)] = False
    json: Annotated[bool, flag("--json", "Print the report of a collection as JSON.")] = False

    @cached_property
    def variables(self) -> dict[str, str]:
        """The variables of `--env`.

        Raises:
            ConfigError: If an entry is not NAME=VALUE.
        """
        return parse_variables(self.env or ())


def collection_request(
    mode: str | None, quant_type: str | None, options: CollectionOptions
) -> CollectionRequest | None:
    """Return the collection run that the options request, None for a plain `capd run`.

    Raises:
        ConfigError: If a plain `capd run` got an option for collections only, or if an option is wrong.
    """
    if mode is None or mode.strip().lower() not in MODES:
        given = [
            name
            for name, value in vars(options).items()
            if value is not None and value is not False and value != []
        ]
        if given:
            name = f"--{given[0].replace('_', '-')}"
            raise ConfigError(f"{name} belongs to a collection run: --mode {', '.join(MODES)}")
        return None
    return make_request(
        mode.strip().lower(),
        quant_type,
        options.control_iter,
        options.collect_micro_batches,
        until=options.until,
        stable_for=options.stable_for,
        timeout=options.timeout,
    )


def run_collection(
    request: CollectionRequest,
    command: Sequence[str],
    options: CollectionOptions,
    place: Place,
    settings: ResolvedJob,
    *,
    label_only: bool,
) -> int:
    """Check, collect and report. Return the exit code of `capd run`.

    Raises:
        ConfigError: If a check fails. Nothing was started.
        CapdError: If the daemon or the state of the collection cannot be used.
        typer.Exit: If the command of a type cannot be executed.
    """
    from capd.store.disk.files import make_directory

    _check(request, place, settings, options.yes)
    run_id, place = _placed(place, request, command)
    directory = directory_of(place.store, run_id)
    state = load(directory, run_id, request, command)
    jobs = _jobs(state, request, directory, command, options, label_only=label_only)
    warning = shared_places(command, options.variables, len(jobs))
    if warning:
        note(warning)
    make_directory(directory)
    try:
        with locked(directory), leaving_on_signals():
            Collection(request, state, directory, jobs, place, settings).run()
    except (KeyboardInterrupt, SystemExit):
        note(f"interrupted; the same command continues run {run_id}")
        note_undrawn(place.store / f"{run_id}.zarr", place.report)
        raise
    run = place.store / f"{run_id}.zarr"
    has_tensors = _report(run, directory, state, options.json)
    missing = [one for one in state.types if one.quant_type in jobs and not one.collected]
    if missing:
        names = ", ".join(one.quant_type for one in missing)
        note(f"not collected: {names}; the same command with --run-id {run_id} retries them")
    code = reported(_exit_code(missing), place.store, run_id, place.report)
    if not options.json:
        note_next(run if run.is_dir() else None, command, has_tensors=has_tensors)
    return code


def _exit_code(missing: Sequence[TypeState]) -> int:
    """Return 0 if no type is missing, the code of the reason if all missing types share one, else 1."""
    codes = {_EXIT_CODES.get(one.outcome, 1) for one in missing} or {0}
    return codes.pop() if len(codes) == 1 else 1


def _check(request: CollectionRequest, place: Place, settings: ResolvedJob, yes: bool) -> None:
    if place.endpoint == "off":
        raise ConfigError("CAPD_ENDPOINT=off: a collection run would collect nothing; unset it")
    if settings.job.mode.startswith("sample:"):
        raise ConfigError(
            f"mode {settings.job.mode} skips calls, but a collection run keeps whole micro-batches; choose how "
            "many with --control-iter, and CAPD_MODE=tensor or stats"
        )
    budget = not place.endpoint and settings.daemon.origins["max_disk"] != "default"
    if not (request.micro_batches or budget or yes):
        raise ConfigError(
            "--control-iter 0 collects every micro-batch of the job; set how much it may take (CAPD_MAX_DISK=200GB, or "
            "max_disk in [daemon] of capd.toml), or say --yes"
        )


def _placed(place: Place, request: CollectionRequest, command: Sequence[str]) -> tuple[str, Place]:
    """Return the unfinished run of the collection or a new run, and `place` with it.

    The store is the store of the joined daemon, if there is one.
    """
    from capd.server.runs.names import check_run_id, new_run_id

    store = place.store.absolute()
    if place.endpoint:
        joined = join(place.endpoint, place.run_id)
        if joined.store is None:
            raise EndpointError("nothing was started; start `capd serve`, or unset CAPD_ENDPOINT")
        store = joined.store
    run_id = place.run_id
    if run_id is None:
        run_id = unfinished(store, request, command)
        if run_id is not None:
            note(f"continuing {run_id}, which was not finished; --run-id NAME begins a new one")
    run_id = check_run_id(run_id) if run_id is not None else new_run_id(store)
    return run_id, place._replace(store=store, run_id=run_id)


def _jobs(
    state: CollectionState,
    request: CollectionRequest,
    directory: Path,
    command: Sequence[str],
    options: CollectionOptions,
    *,
    label_only: bool,
) -> dict[str, TypeJob]:
    """Return the job of each requested type. Its command was found and every path of `--require` exists."""
    found: dict[str, TypeJob] = {}
    for index, one in enumerate(state.types):
        if one.quant_type not in request.types:
            continue
        run_dir, _ = paths_of_try(directory, one.model_copy(update={"tries": one.tries + 1}))
        filled = fill(
            command,
            options.variables,
            options.require or (),
            quant_type=one.quant_type,
            run_dir=run_dir,
            index=index,
        )
        program = find_command(filled.command[0])
        for path in filled.required:
            _require(path)
        choice = choose(one.quant_type, {**os.environ, **filled.variables}, label_only=label_only)
        found[one.quant_type] = replace(filled, command=(program, *filled.command[1:])), choice
    return found


def _require(path: str) -> None:
    """Raise ConfigError unless the path exists, or is the prefix of a Megatron data set."""
    if not os.path.exists(path) and not all(os.path.exists(f"{path}{suffix}") for suffix in (".bin", ".idx")):
        raise ConfigError(
            f"--require: {path} does not exist (nor {path}.bin with .idx); prepare it, or correct the path; nothing "
            "was started"
        )


def _report(run: Path, directory: Path, state: CollectionState, as_json: bool) -> bool:
    """Print the report of a run, and write it into the collection's directory as JSON and as text.

    Return whether the run has tensors.
    """
    from capd.collect.report import collection_report
    from capd.collect.report_text import report_lines, type_lines
    from capd.store.read.store import open_store

    tables, is_written, store = TextTables(_NAMES, _SPARE), False, None
    if run.is_dir():
        store = open_store(run)
        report = collection_report(store, state)
        document, lines = strict_json(report), report_lines(report, tables)
        try:
            write_text(directory / "report.json", json.dumps(document, indent=2, ensure_ascii=False) + "\n")
            write_text(directory / "report.txt", "".join(f"{line}\n" for line in report_lines(report)))
            is_written = True
            note(f"the report is in {directory}: report.json, report.txt")
        except OSError as error:
            note(f"the report cannot be written into {directory}: {error.strerror or error}")
    else:
        note(f"there is no report, as nothing was captured into {run}")
        document = {"types": [one.model_dump() for one in state.types]}
        lines = iter(type_lines(document["types"], tables))
    print_either(document, lines, as_json=as_json)
    if tables.left_out and not as_json:
        rest = "; report.txt has all columns" if is_written else ""
        note(f"left out to fit the terminal: {', '.join(tables.left_out)}{rest}")
    return store is not None and bool(store.series)
