"""`capd verify`: checks one run or all runs of a store root. `--repair` saves readable records into a new run."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from capd.cli.completion import store_paths
from capd.cli.options import Json, grouped, option
from capd.cli.output import human_count, human_nbytes, note, print_json, print_lines
from capd.cli.progress import StatusLine
from capd.cli.scheduling import ClusterOptions
from capd.cli.stores import Given, default_store, is_run
from capd.errors import ConfigError, NotAStore, NothingMatched, RemovedRun, StoreBusy, StoreError
from capd.store.objects.address import Address, RunPlace, place_of

if TYPE_CHECKING:
    from capd.store.repair.result import Repair
    from capd.store.verify.damage import Report
    from capd.store.verify.run import CheckEach

__all__ = ["verify"]


@grouped
def verify(
    store: Annotated[
        Given | None,
        typer.Argument(
            metavar="[STORE]",
            help="A run (NAME.zarr), or a directory of runs, all of them checked. Both may be addresses, as "
            "s3://BUCKET/KEY. Default: CAPD_STORE, else store in capd.toml, else captures.",
            show_default=False,
            parser=place_of,
            autocompletion=store_paths,
        ),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Save all records that can be read into a new run; needs -o.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="NEW", help="The new run of --repair (NAME.zarr)."),
    ] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild-catalog", help="Build the catalog again from the shard files.")
    ] = False,
    adopt: Annotated[
        str | None, typer.Option(metavar="NODE", help="Take over and seal the records that a dead node left.")
    ] = None,
    listing: Annotated[
        bool,
        typer.Option(
            "--listing", help="Of a run in an object store, check only names and sizes of the objects."
        ),
    ] = False,
    *,
    cluster: ClusterOptions,
    workers: Annotated[
        int | None,
        option("--workers", "N", "Threads or processes that check [default: the CPUs].", min=1, max=1024),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every checksum of a run, and that its files agree. Exit with 4 if there is damage.

    Without an option, nothing is changed, and a daemon may be writing the run. For a directory of runs, all of them
    are checked. Of an address, as s3://BUCKET/KEY, the objects that the manifests name are checked: that they are
    there with their sizes, then every checksum as of a run here. --repair changes nothing in the damaged run. It
    exits with 4 if records were lost, and lists them.
    """
    if sum((repair, rebuild, adopt is not None)) > 1:
        raise ConfigError("give one of --repair, --rebuild-catalog and --adopt")
    if repair != (output is not None):
        raise ConfigError(
            "--repair and -o NEW belong together: the damaged run stays unchanged, NEW gets its records"
        )
    if isinstance(store, Address):
        if repair or rebuild or adopt is not None:
            raise ConfigError(
                f"{store} is in an object store, which --repair, --rebuild-catalog and --adopt do not change; "
                "bring the run here with `capd cp`, repair it, and upload it to another place"
            )
        if listing and cluster.is_used:
            raise ConfigError("--listing reads no shard, so there is nothing for --scheduler")
        _end(_check_remote(store, cluster, workers, listing=listing), [], as_json=as_json)
    if listing:
        raise ConfigError("--listing is for a run in an object store; a run on this machine has no listing")
    runs = _runs(store)
    if output is not None:
        raise typer.Exit(_repair(runs, output, as_json=as_json))
    changed: list[dict[str, str]] = []
    if rebuild or adopt is not None:
        with _warnings_on_stderr():
            changed = list(_change(runs, adopt=adopt))
    _end(_check_all(runs, cluster, workers), changed, as_json=as_json)


def _end(reports: list[Report], changed: list[dict[str, str]], *, as_json: bool) -> NoReturn:
    """Print what was changed and found, and end the command."""
    if as_json:
        print_json(_plain(reports, changed, []))
    else:
        print_lines(f"{Path(one['run']).name}, node {one['node']}: {one['message']}" for one in changed)
        _print(reports)
    raise typer.Exit(0 if all(report.ok for report in reports) else 4)


def _runs(store: Path | None) -> list[Path]:
    from capd.store.read.store import runs
    from capd.store.verify.damage import Report
    from capd.store.verify.run import run_identity

    place = default_store() if store is None else store
    found = [place] if is_run(place) or not place.is_dir() else list(runs(place))
    if not found:
        raise NotAStore(f"no run in {place}; name a run or a directory of runs")
    kept = []
    for run in found:
        try:
            # A path that is no run must not be locked or written.
            run_identity(run, Report(run))
            kept.append(run)
        except RemovedRun as removed:
            if len(found) == 1:
                raise
            note(f"left out: {removed}")
    return kept


def _check_remote(
    place: Address, cluster: ClusterOptions, workers: int | None, *, listing: bool
) -> list[Report]:
    from capd.store.remote.run import run_places
    from capd.store.verify.remote import verify_remote

    runs = [place] if place.is_run else run_places(place)
    if not runs:
        raise NotAStore(f"no run below {place}; name a run or a prefix of runs")

    def check(run: Address, **how: Any) -> Report:
        with StatusLine() as line:
            return verify_remote(run, progress=partial(_draw, line, run.name), **how)

    if not cluster.is_used:
        return [check(run, listing=listing, threads=workers) for run in runs]
    with _cluster(cluster, workers, runs) as checks_on:
        return [check(run, checks_of=partial(checks_on, run)) for run in runs]


@contextlib.contextmanager
def _cluster(
    cluster: ClusterOptions, workers: int | None, runs: Sequence[RunPlace]
) -> Iterator[Callable[[RunPlace, Path], CheckEach]]:
    """Open the cluster that checks some runs. Yield what returns the checks of a run with a directory of metadata."""
    from capd.distributed.tasks.planning import place_text
    from capd.server.limits import usable_cpus

    cluster.refuse_checkpoint("a check")
    task_nbytes, number = cluster.task_nbytes, workers or max(1, round(usable_cpus()))
    with cluster.engine(number, [place_text(run) for run in runs]) as engine:
        from capd.distributed.cluster.verifying import checks_on

        yield lambda place, run: checks_on(engine, place, task_nbytes, run)


def _repair(runs: list[Path], new: Path, *, as_json: bool) -> int:
    """Repair the one run and check the new one. Return the exit code."""
    from capd.server.runs.root_lock import reading_lock
    from capd.store.disk.layout import nodes_of
    from capd.store.repair.repair import repair

    if len(runs) > 1:
        raise ConfigError(f"{runs[0].parent} holds {len(runs)} runs; name the one to repair")
    [run] = runs
    with contextlib.ExitStack() as stack:
        for node in nodes_of(run):
            stack.enter_context(reading_lock(run.absolute().parent, node))
        stack.enter_context(_warnings_on_stderr())
        line = stack.enter_context(StatusLine())
        done = repair(
            run, new, progress=lambda nbytes: line.draw(f"{run.name}: {human_nbytes(nbytes)} saved")
        )
    report = _check(new)
    if as_json:
        print_json(_plain([report], [], [done]))
    else:
        print_lines(_repair_lines(done))
        _print([report])
    return 0 if report.ok and done.is_complete else 4


def _change(runs: list[Path], *, adopt: str | None) -> Iterator[dict[str, str]]:
    """Change each node's part of the runs. Yield run, node and a message for each."""
    from capd.store.disk.layout import nodes_of
    from capd.store.repair.catalog import rebuild_catalog, take_over

    everywhere = sorted({node for run in runs for node in nodes_of(run)})
    if adopt is not None and adopt not in everywhere:
        raise NothingMatched(f"no node {adopt!r} in {runs[0]}; known: {', '.join(everywhere) or 'none'}")
    message = (
        "catalog built again from the shard files" if adopt is None else "taken over: everything is sealed"
    )
    worked = 0
    busy: StoreBusy | None = None
    for run in runs:
        for node in nodes_of(run):
            if adopt not in (None, node):
                continue
            try:
                with _locked(run, node):
                    (rebuild_catalog if adopt is None else take_over)(run, node)
                yield {"run": str(run), "node": node, "message": message}
                worked += 1
            except StoreBusy as error:
                busy = error
                note(f"node {node} of {run} is left alone: {error}")
    if busy is not None and not worked:
        raise busy


@contextlib.contextmanager
def _locked(run: Path, node: str) -> Iterator[None]:
    """Hold the node's lock of the store root, as the daemon does. Raises StoreBusy, StoreError."""
    from capd.server.runs.root_lock import RootLock

    lock = RootLock(run.absolute().parent, node)
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot change {run}: {error.strerror or error}") from error
    finally:
        lock.release(keep_note=True)


@contextlib.contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Print recovery's warnings about damage as messages of this command."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("capd: %(message)s"))
    logger = logging.getLogger("capd")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _draw(line: StatusLine, name: str, nbytes: int) -> None:
    line.draw(f"{name}: {human_nbytes(nbytes)} checked")


def _check_all(runs: list[Path], cluster: ClusterOptions, workers: int | None) -> list[Report]:
    if not cluster.is_used:
        return [_check(run, threads=workers) for run in runs]
    with _cluster(cluster, workers, runs) as checks_on:
        return [_check(run, check_each=checks_on(run, run)) for run in runs]


def _check(run: Path, **how: Any) -> Report:
    from capd.store.verify.run import verify_run

    with StatusLine() as line:
        return verify_run(run, progress=partial(_draw, line, run.name), **how)


def _print(reports: list[Report]) -> None:
    for report in reports:
        for text in report.notes:
            note(text)
        print_lines(str(damage) for damage in report.damaged)
        if any(damage.kind == "catalog" for damage in report.damaged) and isinstance(report.run, Path):
            note(f"`capd verify {report.run} --rebuild-catalog` builds the catalog again from the frames")
        verdict = "sound" if report.ok else f"{human_count(len(report.damaged), 'place')} damaged"
        print_lines(
            [
                f"{report.run.name}: {verdict}; {human_count(report.series)} series, "
                f"{human_count(report.records, 'record')}{_of_records(report.error_records)}, "
                f"{human_nbytes(report.nbytes)} checked"
            ]
        )


def _of_records(errors: int) -> str:
    return f", errors of {human_count(errors, 'record')}" if errors else ""


def _repair_lines(done: Repair) -> Iterator[str]:
    saved = human_count(done.saved, "record") + _of_records(done.saved_errors)
    errors = sum(one.is_errors for one in done.lost)
    missing = human_count(len(done.lost) - errors, "record") + _of_records(errors)
    lost = "nothing lost" if done.is_complete else f"{missing} lost"
    lost += ", and more without a known series" if done.unknown else ""
    yield f"{done.run.name}: {saved} saved in {done.new}, {lost}; {done.run} is unchanged"
    for one in done.lost:
        yield f"{one.path} record {one.number}: {'moment unknown' if one.row is None else _moment(one.row.moment)}"
    for path in done.unknown:
        yield f"{path}: no file describes the series; nothing of it is saved"


def _moment(moment: Any) -> str:
    import msgspec

    fields = msgspec.structs.asdict(moment)
    return ", ".join(f"{name} {value}" for name, value in fields.items() if value not in (None, False))


def _plain(reports: list[Report], changed: list[dict[str, str]], repaired: list[Repair]) -> dict[str, Any]:
    from dataclasses import asdict

    damaged = [
        {"run": str(report.run), **asdict(damage), "records": list(damage.records)}
        for report in reports
        for damage in report.damaged
    ]
    return {
        "ok": not damaged and all(one.is_complete for one in repaired),
        "runs": [str(report.run) for report in reports],
        "series": sum(report.series for report in reports),
        "records": sum(report.records for report in reports),
        "error_records": sum(report.error_records for report in reports),
        "bytes": sum(report.nbytes for report in reports),
        "moved_shards": sum(report.moved.total() for report in reports),
        "damaged": damaged,
        "notes": [text for report in reports for text in report.notes],
        "changed": changed,
        "repaired": [_plain_repair(one) for one in repaired],
    }


def _plain_repair(done: Repair) -> dict[str, Any]:
    from msgspec.structs import asdict

    lost = [
        {
            "series": one.path,
            "key": asdict(one.key),
            "record": one.number,
            "is_errors": one.is_errors,
            "moment": None if one.row is None else asdict(one.row.moment),
        }
        for one in done.lost
    ]
    places = {"run": str(done.run), "new": str(done.new)}
    return {
        **places,
        "saved": done.saved,
        "saved_errors": done.saved_errors,
        "lost": lost,
        "unknown": done.unknown,
    }
