"""`capd import`: reads files of tensor_saver, of `capd export` or of other tools into a run."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capd.cli.options import Config, Json, StoreRoot, local_path, option
from capd.cli.output import human_count, human_nbytes, print_either
from capd.cli.progress import Progress
from capd.cli.sources import LayerBase
from capd.errors import NO_SPACE, ConfigError, StoreError, StoreFull
from capd.exchange.recognise import TOOLS, FoundFiles, Tool
from capd_client.process.text import printable

if TYPE_CHECKING:
    from capd.config import DaemonSettings
    from capd.pt_files.import_ import Outcome

__all__ = ["import_files"]


def import_files(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Directory with the files, also in directories below it.",
            parser=local_path,
        ),
    ],
    store: StoreRoot = None,
    run_id: Annotated[
        str | None, option("--run-id", "NAME", "Run to import into [default: the name of DIR].")
    ] = None,
    config: Config = None,
    layer_base: LayerBase = 0,
    peer: Annotated[
        Tool | None,
        option("--from", "TOOL", f"Only files of this tool: {', '.join(TOOLS)} [default: by their names]."),
    ] = None,
    tensor_ranks: Annotated[
        int | None,
        option(
            "--tp", "N", "megatron: tensor parallel ranks [default: those of the files].", min=1, max=99_999
        ),
    ] = None,
    stages: Annotated[
        int | None,
        option(
            "--pp", "N", "megatron: pipeline stages of the job; files of several need it.", min=1, max=99_999
        ),
    ] = None,
    expert_ranks: Annotated[
        int | None,
        option(
            "--ep", "N", "megatron: expert parallel ranks [default: those of the files].", min=1, max=99_999
        ),
    ] = None,
    chunks: Annotated[
        int, option("--vpp", "N", "megatron: model chunks of each stage.", min=1, max=9_999)
    ] = 1,
    layers: Annotated[
        int | None, option("--layers", "N", "megatron: layers of the whole model.", min=1, max=999_999)
    ] = None,
    jobs: Annotated[
        int | None, option("--jobs", "N", "Threads that load and encode [default: the CPUs].", min=1, max=256)
    ] = None,
    codec: Annotated[str | None, option("--codec", "CODEC", "As for `capd serve` [default: auto].")] = None,
    keep_free: Annotated[
        str | None, option("--keep-free", "SIZE", "Disk space to leave free [default: 10%].")
    ] = None,
    as_json: Json = False,
) -> None:
    """Import the files that one tool wrote below DIR into a run.

    \b
    Tools, which are known by the names of their files:
      pt        tensor_saver, or `capd export --to pt`: every other .pt or .pth
                file, in the order of their writing (docs/migration-files.md)
      msprobe   dumps of mindstudio-probe: dump.json and dump_tensor_data/
      sglang    files of sglang's dumper: step=S___rank=R___dump_index=I___….pt
      megatron  Megatron-LM's --save-activations, --save-dgrads, --save-wgrads:
                iter_*/mp_rank_TT[_PPP][_EEE].pth; a pipeline needs --pp, --layers
      nvdlfw    statistics logs of nvdlfw-inspect, *_globalrank-R.log, as scalars

    If DIR has files of several tools, or of two jobs, nothing is imported and the message names them.
    docs/exchange.md says what each tool's files become. Nothing in a file is executed, and symbolic links are not
    followed. A file or tensor that is damaged, hostile, of another kind, or a plain pickle (.pkl) is named on stderr
    and skipped.

    An interrupted import continues when it is given again. A repeated one adds only new files: a file is known by
    its absolute path and size, a line of a log by its text. About 128 MiB of files and records are in memory at once,
    or one file and its record if they are larger. Each file adds some 400 bytes.

    \b
    Examples:
      capd import ./enhanced_tensor_logs --store captures
      capd import ./old --run-id old --layer-base 1
      capd import ./saved --pp 2 --layers 48
      capd import ./mixed --from nvdlfw --run-id logs

    \b
    Exit codes:
      1  some files or tensors were skipped, the others are imported
      2  DIR has files of several tools or jobs, or they contradict an option
      5  no file of a tool was found
      6  the disk is full, or has less than --keep-free left
      7  a daemon owns the store
    """
    from capd.config import load_daemon_settings
    from capd.exchange.megatron.layers import PipelineLayout
    from capd.exchange.megatron.ranks import AxisSizes
    from capd.exchange.recognise import FileFacts, found_files
    from capd.server.heap import settled_heap
    from capd.server.runs.names import check_run_id

    settings = load_daemon_settings({"store": store, "codec": codec, "keep_free": keep_free}, path=config)
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; name the one that holds the tensor files")
    name = check_run_id(run_id or _run_name(directory))
    pipeline = PipelineLayout(stages or 1, chunks, layers or 0)
    sizes = AxisSizes(tensor_ranks, stages, expert_ranks)
    found = found_files(directory, peer, FileFacts(layer_base, sizes, pipeline))
    if found.tool != "megatron" and (any(sizes) or chunks > 1 or layers):
        raise ConfigError(
            f"--tp, --pp, --ep, --vpp and --layers are of Megatron, and these files of {found.tool}"
        )
    with settled_heap(), Progress(found.records, "records") as progress:
        outcomes = _Outcomes(progress)
        _import(settings, name, found, jobs, outcomes)
    run = settings.store / f"{name}.zarr"
    document = {"run": str(run), "format": found.tool, "files": found.files, **outcomes.plain()}
    read = f"{human_count(found.files, 'file')} read"
    print_either(document, [f"{run}: {outcomes}; {read}"], as_json=as_json)
    raise typer.Exit(1 if outcomes.skipped else 0)


def _run_name(directory: Path) -> str:
    return re.sub(r"[^A-Za-z0-9_.\-]+", "-", directory.resolve().name).strip(".-") or "imported"


def _import(
    settings: DaemonSettings,
    name: str,
    found: FoundFiles,
    jobs: int | None,
    outcomes: _Outcomes,
) -> None:
    from capd.server.daemon import node_name
    from capd.server.limits import DiskBudget, raise_open_files, usable_cpus
    from capd.server.runs.root_lock import RootLock
    from capd.space import what_is_full
    from capd.store.run.options import StoreOptions, open_files_within
    from capd.store.run.run_store import RunStore

    root, node = settings.store.absolute(), node_name(settings.node)
    lock = RootLock(root, node)
    try:
        options = StoreOptions(
            codec=settings.codec,
            statistics=settings.statistics,
            open_files=open_files_within(raise_open_files()),
        )
        budget = DiskBudget(root, None, settings.keep_free)
        run = RunStore(root, name, node, options)
        try:
            threads = jobs or max(1, round(usable_cpus()))
            for outcome in found.read(run, threads=threads, limit=budget.refusal):
                outcomes.take(outcome)
        finally:
            run.seal()
            run.close()
    except OSError as error:
        if error.errno in NO_SPACE:
            why = what_is_full(error, root)
            raise StoreFull(
                f"cannot write to {root}: {why} and give the import again: it continues where it stopped"
            ) from error
        raise StoreError(f"cannot write to {settings.store}: {error.strerror or error}") from error
    finally:
        lock.release(keep_note=True)


class _Outcomes:
    """The counted outcomes of all files."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.imported = self.already = self.raw_nbytes = 0
        self.skipped: list[tuple[str, str]] = []

    def take(self, outcome: Outcome) -> None:
        self._progress.add(outcome.raw_nbytes)
        if outcome.problem is not None:
            file = printable(os.fsencode(outcome.file.path).decode(errors="replace"))
            reason = printable(outcome.problem)
            self.skipped.append((file, reason))
            self._progress.say(f"skipped {file}: {reason}")
        elif outcome.already:
            self.already += 1
        else:
            self.imported += 1
            self.raw_nbytes += outcome.raw_nbytes

    def plain(self) -> dict[str, Any]:
        return {
            "imported": self.imported,
            "already": self.already,
            "raw_bytes": self.raw_nbytes,
            "skipped": [{"file": file, "reason": reason} for file, reason in self.skipped],
        }

    def __str__(self) -> str:
        parts = [f"{human_count(self.imported, 'record')} imported ({human_nbytes(self.raw_nbytes)} raw)"]
        parts += [f"{human_count(self.already)} there already"] if self.already else []
        parts += [f"{human_count(len(self.skipped))} skipped"] if self.skipped else []
        return ", ".join(parts)
