"""The records of commands that read whole runs, and the loop over these records."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from capd.cli.options import flag, option
from capd.cli.output import note
from capd.cli.progress import Progress
from capd.cli.scheduling import ByteProgress, ClusterOptions
from capd.cli.selection import KeyOptions
from capd.cli.stores import AttemptOption, RunOption, attempt_of, is_run, resolve_run
from capd.errors import CapdError, ConfigError, DamagedRecord, NothingMatched
from capd.store.objects.address import Address, RunPlace, place_of

if TYPE_CHECKING:
    from capd.distributed.tasks.task import TaskPlan
    from capd.io.items import Items
    from capd.report.gather import GatheredRecords

__all__ = [
    "LayerBase", "SourceOptions", "Sources", "found_beside", "found_in", "holds_files", "one_thread_each",
]  # fmt: skip

LayerBase = Annotated[
    int,
    option(
        "--layer-base", "0|1", "Number of the first layer in .pt files that capd did not write.", min=0, max=1
    ),
]


@dataclass(frozen=True)
class SourceOptions:
    """The options that choose the records of whole runs or of tensor files."""

    run: RunOption = None
    all_runs: Annotated[bool, flag("--all-runs", "Read all runs in STORE together, not only the newest.")] = (
        False
    )
    layer_base: LayerBase = 0
    keys: KeyOptions = field(default_factory=KeyOptions)
    sample: Annotated[
        str | None,
        option("--sample", "SHARE", "Read only this share of each series' records, evenly spread, as 5%."),
    ] = None
    attempt: AttemptOption = "latest"
    workers: Annotated[
        int | None,
        option("--workers", "N", "Threads that read, or processes [default: the CPUs].", min=1, max=1024),
    ] = None

    @property
    def threads(self) -> int:
        """The number of threads: `workers`, or one for each CPU."""
        from capd.server.limits import usable_cpus

        return self.workers or max(1, round(usable_cpus()))

    @property
    def share(self) -> float:
        """The share of the records to read. Raises ConfigError if it is none."""
        from capd.io.sample import share_of

        return 1.0 if self.sample is None else share_of(self.sample)


@dataclass(frozen=True)
class Sources:
    """The records to read.

    Attributes:
        names: Their runs or directory.
        files: Whether they are tensor files.
        share: The share of the records to read.
        attempt: The attempts of the records.
        cluster: Who reads them.
    """

    names: list[str]
    items: Items
    files: bool
    threads: int
    share: float
    attempt: int | str = "latest"
    cluster: ClusterOptions = field(default_factory=ClusterOptions)

    def gather(self, gathered: GatheredRecords, **asked: Any) -> None:
        """Gather all records with a progress bar, and name skipped ones. `asked`: further arguments of `gather`.

        Raises:
            ConfigError: If a sample is requested, but no elements are.
            NothingMatched: If no tensor file matches the selection.
            DamagedRecord: If no record of a run could be read.
            CapdError: If no tensor file could be read.
        """
        from capd.io.sample import Sample
        from capd.phrase import phrase_text
        from capd.report.format_errors import sample_numbers
        from capd.report.names import sample_phrase

        if self.share < 1:
            if asked.get("quick"):
                raise ConfigError(
                    "--sample means nothing here: stored statistics are read alone, and no tensor is"
                )
            gathered.sample = Sample(self.share)
        if self.cluster.is_used:
            self._gather_on_cluster(gathered, **asked)
        else:
            self._gather_here(gathered, **asked)
        if not gathered.groups.whole().records:
            if not gathered.skipped:
                raise NothingMatched(f"no tensor file in {self.names[0]} matches the selection")
            kind = CapdError if self.files else DamagedRecord
            raise kind(f"none of {self.items.total:,} records could be read")
        sample = sample_numbers(gathered)
        if sample is not None:
            note(phrase_text(sample_phrase(sample)))

    def _gather_here(self, gathered: GatheredRecords, **asked: Any) -> None:
        from capd.report.gather import Skipped, gather
        from capd.server.heap import settled_heap

        if asked.get("choices"):
            one_thread_each()
        with settled_heap(), Progress(self.items.total, "records") as progress:
            for seen in gather(self.items.found, gathered, threads=self.threads, **asked):
                if isinstance(seen, Skipped):
                    progress.say(f"skipped {seen.name}: {seen.reason}")
                progress.add(0 if isinstance(seen, Skipped) else seen)

    def plan(self, gathered: GatheredRecords, task_nbytes: int, **asked: Any) -> TaskPlan:
        """Return the tasks that gather all records. Raises ConfigError for tensor files."""
        from capd.distributed.tasks.planning import planned
        from capd.distributed.tasks.question import Question

        if self.items.series is None:
            raise ConfigError(
                f"{self.names[0]} has .pt files, which --scheduler threads reads alone; `capd import` makes a run of "
                "them"
            )
        question = Question.of(gathered, self.share, **asked)
        return planned(self.items.series, question, task_nbytes, self.attempt)

    def _gather_on_cluster(self, gathered: GatheredRecords, **asked: Any) -> None:
        from capd.distributed.tasks.planning import place_text
        from capd.report.gather import Skipped

        cluster = self.cluster
        plan = self.plan(gathered, cluster.task_nbytes, **asked)
        runs = [place_text(name) for name in self.names]
        with contextlib.ExitStack() as stack:
            checkpoint = None
            if cluster.checkpoint is not None:
                from capd.distributed.cluster.checkpoint import Checkpoint

                checkpoint = stack.enter_context(Checkpoint(cluster.checkpoint, plan.identity))
            largest = (plan.largest, plan.largest_name)
            engine = stack.enter_context(cluster.engine(self.threads, runs, largest))
            from capd.distributed.cluster.gathering import gather_on

            progress = stack.enter_context(ByteProgress(plan.nbytes, engine))
            for seen in gather_on(engine, plan, gathered, checkpoint=checkpoint):
                if isinstance(seen, Skipped):
                    progress.say(f"skipped {seen.name}: {seen.reason}")
                else:
                    progress.add(seen)

    def exit_code(self, gathered: GatheredRecords) -> int:
        """Return 4 if damaged records were skipped, 1 if bad files were skipped, otherwise 0."""
        return (1 if self.files else 4) if gathered.skipped else 0


def found_in(place: RunPlace, options: SourceOptions) -> Sources:
    """Find the records to read: of the newest run in a directory, of one run, of all runs, or of tensor files.

    Raises:
        ConfigError: If a sample of tensor files is requested.
        NothingMatched: If no series passes the tests. Tensor files are tested only when they are loaded.
    """
    from capd.io.items import items_of_files, items_of_runs

    tests, share = options.keys.tests(), options.share
    if isinstance(place, Path) and holds_files(place):
        items = items_of_files(place, tests, options.layer_base)
        if items.total and share < 1:
            raise ConfigError(
                f"--sample reads a part of a run, and {place} has .pt files; `capd import` makes one of them"
            )
        if items.total:
            return Sources([str(place)], items, True, options.threads, share)
    paths = _runs(place, options.run, options.all_runs)
    attempt = attempt_of(options.attempt)
    items = items_of_runs(paths, tests, share, attempt)
    names = [str(path) for path in paths]
    if not items.total:
        from capd.store.read.store import open_store

        keys = [series.key for path in paths for series in open_store(path).series]
        raise options.keys.nothing_in(", ".join(names), keys)
    return Sources(names, items, False, options.threads, share, attempt)


def found_beside(places: Sequence[RunPlace], options: SourceOptions) -> Sources:
    """Find the records of several runs or directories, each with its run's name before the quant type.

    Raises:
        ConfigError: If a run is given twice, or runs are mixed with directories of tensor files.
        CapdError: As `found_in` does.
    """
    from capd.io.beside import beside

    each = [found_in(place, options) for place in places]
    names = [name for one in each for name in one.names]
    if len({one.files for one in each}) > 1:
        raise ConfigError(
            "give runs, or directories of .pt files, not both; `capd import` reads files into a run"
        )
    if len({_real(name) for name in names}) < len(names):
        raise ConfigError(f"a run is given twice: {', '.join(names)}; name each once")
    labels = [
        _real(one.names[0]).stem if len(one.names) == 1 else _real(str(place)).name
        for one, place in zip(each, places, strict=True)
    ]
    if len({*labels}) < len(each):
        labels = [", ".join(one.names) for one in each]
    items = beside({label: one.items for label, one in zip(labels, each, strict=True)})
    return Sources(names, items, each[0].files, options.threads, options.share, attempt_of(options.attempt))


def _real(name: str) -> RunPlace:
    place = place_of(name)
    return place if isinstance(place, Address) else place.resolve()


def _runs(place: RunPlace, run: str | None, all_runs: bool) -> list[RunPlace]:
    if isinstance(place, Path) and any(place.glob("*/*.pt")):
        note(f"{place} also has tensor files, which are not read; `capd import` reads them into a run")
    if not all_runs:
        return [resolve_run(place, run)]
    if run is not None:
        raise ConfigError("--run names one run and --all-runs takes all of them; give one of the two")
    from capd.store.read.store import runs_at

    return ([] if is_run(place) else list(runs_at(place))) or [resolve_run(place)]


def one_thread_each() -> None:
    """Limit torch to one thread for each of our threads. Otherwise torch's threads would wait for each other."""
    import torch

    torch.set_num_threads(1)


def holds_files(place: Path) -> bool:
    """Return whether `place` can only be a directory of tensor files: it is not a run and contains none."""
    return place.is_dir() and not is_run(place) and not any(place.glob("*.zarr/zarr.json"))
