"""`capd export`: writes records of a run as .pt files of tensor_saver, arrays or a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from capd.cli.options import Json, flag, grouped, option
from capd.cli.output import human_count, human_nbytes, note, print_either
from capd.cli.progress import Progress
from capd.cli.scheduling import ClusterOptions
from capd.cli.selection import KeyOptions, Tests
from capd.cli.store.export_tasks import ClusterExport
from capd.cli.stores import AttemptOption, RunOption, StoreArgument, attempt_of, resolve_run
from capd.cli.table import prose
from capd.errors import ConfigError, NothingMatched
from capd.exchange.peers import WRITERS, ExportRequest, export_for
from capd.pt_files.dictionary import Naming, TensorNames
from capd.pt_files.names import Scheme
from capd_client.protocol.scalars import scalar_key

if TYPE_CHECKING:
    from capd.output_directory import ExportedFile
    from capd.store.read.scalars import Scalar
    from capd.store.read.series import Series
    from capd.store.read.store import Store

__all__ = ["export"]

_WITH_STATISTICS = ("parquet", "tensorboard")
_WITHOUT_TENSORS = "they keep only statistics; --to parquet and --to tensorboard export those"
# The numbers of records that are in no file, by reason; None if the number is not known.
LeftOut = dict[str, int | None]

Format = Literal["pt", "npz", "safetensors", "parquet", "csv", "msprobe", "sglang", "tensorboard"]


@grouped
def export(
    store: StoreArgument = None,
    to: Annotated[Format, option("--to", "FORMAT", f"Format: {', '.join(get_args(Format))}.")] = "pt",
    out: Annotated[
        Path | None,
        option("--out", "DIR", "Where the files go; without it, only say how much that would be.", "-o"),
    ] = None,
    run: RunOption = None,
    names: Annotated[Scheme, option("--names", "A|B|C", "pt: naming scheme of the files.")] = "C",
    tensor_names: Annotated[
        TensorNames,
        option(
            "--tensor-names",
            "tensor_saver|capd",
            "pt: names of a Linear's dY and dX; tensor_saver calls them input and output of the backward.",
        ),
    ] = "tensor_saver",
    layer_base: Annotated[
        int, option("--layer-base", "0|1", "pt: number of the first layer.", min=0, max=1)
    ] = 0,
    logical: Annotated[
        bool, flag("--logical", "pt, npz: whole tensors, put together from the parts of all ranks.")
    ] = False,
    repeat_weights: Annotated[
        bool, flag("--repeat-weights", "msprobe: write a weight for every call, not once.")
    ] = False,
    *,
    keys: KeyOptions,
    jobs: Annotated[
        int | None,
        option(
            "--jobs",
            "N",
            "pt: threads that write; or processes of --scheduler [default: the CPUs].",
            "--workers",
            min=1,
            max=1024,
        ),
    ] = None,
    cluster: ClusterOptions,
    attempt: AttemptOption = "latest",
    as_json: Json = False,
) -> None:
    """Write the records of a run as files. No file is ever replaced. Of records at one moment, only the newest is
    written; --attempt all writes all.

    \b
    Formats:
      pt           one file per record, as tensor_saver wrote them:
                   DIR/QUANT_TYPE/….pt, for torch.load(weights_only=True)
      npz          one file per series: an array per record, named by its number,
                   in the stored bits (uint16 for bfloat16, uint8 for 8-bit
                   floats); `capd` is JSON with key, dtype, moments, shapes
      safetensors  the same, in the dtypes of safetensors (fnuz formats and packed
                   fp4 as U8); the JSON is the metadata `capd`
      parquet      one table, DIR/records.parquet: a row per record with key,
                   moment, shape and statistics; needs `pip install "capd[table]"`
      csv          the scalars, and no tensor: one table, DIR/scalars.csv, with
                   name, rank, iteration, micro_batch, call, time_ns and value
      msprobe      a dump of mindstudio-probe, DIR/step<N>/rank<R>/, for its
                   compare and graph_visualize
      sglang       one file per record, as sglang's dumper writes, in DIR/RUN: its
                   comparator joins the parts whose places are known
      tensorboard  events in DIR/RUN/rankR: statistics, histograms of log2|x|,
                   errors that the lab measured, scalars; needs
                   `pip install "capd[tensorboard]"`

    Only parquet and tensorboard have the records that keep only statistics. Records that are in no file are counted
    on stderr by reason, and in the JSON. A file has its name only once it is
    whole; the umask gives its mode. An interrupted export leaves whole files. A second export into the same directory
    starts from the beginning: give it an empty one. About 128 MiB of records are in memory at once, or one record if
    it is larger. docs/exchange.md describes the files for other tools.
    docs/migration-files.md describes the .pt files.

    With --logical, a file holds a whole tensor (docs/logical.md): DIR/QUANT_TYPE/….pt for each moment, or
    DIR/QUANT_TYPE/NAME.npz. Nothing is written if a part of any of them is missing.

    \b
    Examples:
      capd export captures --run exp7 --out files
      capd export captures --layer 0-3           (how much would that be?)
      capd export captures --to npz --tensor weight -o arrays
      capd export captures --to parquet -o table
      capd export captures --to csv -o scalars
      capd export captures --logical --tensor weight -o whole

    \b
    Exit codes:
      2  --logical: a part is missing or does not fit
      4  a scalar cannot be read; the others are written
      5  nothing matches
      6  the disk is full
      7  another export writes to DIR
    """
    from capd.server.heap import settled_heap
    from capd.store.read.store import open_store

    opened, tests = open_store(resolve_run(store, run)), keys.tests()
    if to in ("csv", "parquet") and cluster.is_used:
        raise ConfigError(f"--to {to} is one table, which one process writes; leave --scheduler out")
    if to in WRITERS and cluster.is_used:
        raise ConfigError(f"one process writes the files of --to {to}; leave --scheduler out")
    naming = Naming(names, tensor_names, layer_base)
    if logical:
        if cluster.is_used:
            raise ConfigError("--logical joins the parts in this process; leave --scheduler out")
        _export_whole(opened, tests, keys, attempt_of(attempt), out, to, naming, as_json)
        return
    if to == "csv":
        raise typer.Exit(_export_scalars(opened, tests, out, attempt_of(attempt), as_json))
    everything = opened.find(attempt=attempt_of(attempt))
    found = [series for series in everything if all(test(series.key) for test in tests)]
    chosen = found if to in _WITH_STATISTICS else [series for series in found if series.kept == "tensor"]
    if not chosen and not (to == "tensorboard" and _has_scalars(opened, tests)):
        if found:
            raise NothingMatched(
                f"only series of statistics match in {opened.path}; --to parquet and --to tensorboard export them"
            )
        raise keys.nothing_in(str(opened.path), (series.key for series in opened.series))
    left_out: LeftOut = {}
    if len(chosen) < len(found):
        without = [series for series in found if series.kept != "tensor"]
        note(
            f"{human_count(len(without))} series keep only statistics and are left out; --to parquet exports them"
        )
        left_out[_WITHOUT_TENSORS] = sum(map(len, without))
    if out is None:
        _say_how_much(chosen, Path(f"{opened.path.stem}-{to}"), to, as_json)
        return
    if cluster.is_used:
        on_cluster = ClusterExport(cluster, to, attempt_of(attempt), naming, jobs)
        with on_cluster.files(opened, chosen, out) as written:
            _report(written, chosen, out, to, left_out, as_json=as_json)
        return
    if to in WRITERS:
        scalars = _Scalars(opened, tests, attempt_of(attempt), left_out)
        request = ExportRequest(opened.run_id, chosen, out, repeat_weights, scalars, left_out)
        with settled_heap():
            _report(export_for(to, request), chosen, out, to, left_out, as_json=as_json)
        for remark, count in request.remarks.items():
            note(f"{human_count(count, 'record')} {remark}")
        raise typer.Exit(scalars.code)
    with settled_heap():
        written = _files(opened.run_id, chosen, out, to, naming, jobs)
        _report(written, chosen, out, to, left_out, as_json=as_json)


def _has_scalars(opened: Store, tests: Tests) -> bool:
    keys = (scalar_key(name, rank) for name, ranks in opened.scalars().items() for rank in ranks)
    return any(all(test(key) for test in tests) for key in keys)


class _Scalars:
    """Reads the scalars that were chosen. Those that cannot be read are named and left out.

    Attributes:
        code: The exit code: 4 if any could not be read.
    """

    def __init__(self, opened: Store, tests: Tests, attempt: int | str, left_out: LeftOut) -> None:
        self._opened, self._tests, self._attempt, self._left_out = opened, tests, attempt, left_out
        self.code = 0

    def __call__(self) -> Sequence[Scalar]:
        from capd.cli.store.scalar_tables import note_skipped
        from capd.io.scalar_table import readable_scalars

        read = readable_scalars(self._opened, self._tests, self._attempt)
        self.code = note_skipped(read)
        self._left_out.update({f"{one.name}: {one.reason}": None for one in read.skipped})
        return read.found


def _export_whole(
    opened: Store, tests: Tests, keys: KeyOptions, attempt: int | str, out: Path | None, to: str, naming: Naming,
    as_json: bool,
) -> None:  # fmt: skip
    """Export the selected whole tensors, or say how much that would be."""
    from capd.cli.store.whole_tensors import chosen_tensors
    from capd.io.whole_tensors import export_whole_tensors

    chosen, without = chosen_tensors(opened, tests, keys, attempt, to)
    left_out: LeftOut = {}
    if without:
        note(f"{human_count(len(without), 'tensor')} left out: they keep only statistics")
        left_out[_WITHOUT_TENSORS] = sum(map(len, without))
    if out is None:
        records = sum(map(len, chosen))
        what = f"{human_count(records, 'record')} of {human_count(len(chosen), 'whole tensor')}"
        said = f"{what}; nothing is written yet: -o {opened.path.stem}-whole writes it"
        document = {"directory": None, "format": to, "records": records, "tensors": len(chosen)}
        print_either(document, prose([said], 2), as_json=as_json)
        return
    written = export_whole_tensors(opened.run_id, chosen, out, to, naming)
    _report(written, chosen, out, to, left_out, as_json=as_json)


def _export_scalars(opened: Store, tests: Tests, out: Path | None, attempt: int | str, as_json: bool) -> int:
    """Export the scalars that can be read, and return the exit code."""
    from capd.cli.store.scalar_tables import note_skipped
    from capd.io.scalar_table import export_scalars, readable_scalars

    read = readable_scalars(opened, tests, attempt)
    code, found = note_skipped(read), read.found
    if not found:
        names = ", ".join(opened.scalars()) or "none"
        raise NothingMatched(f"no scalar to export from {opened.path}; its scalars: {names}")
    records = sum(map(len, found))
    what = f"{human_count(records, 'value')} of {human_count(len(found), 'scalar')}"
    said: dict[str, Any] = {"directory": out and str(out), "format": "csv", "records": records}
    if out is None:
        target = f"{opened.path.stem}-csv"
        print_either(said, [f"{what}; nothing is written yet: -o {target} writes it"], as_json=as_json)
        return code
    file = export_scalars(found, out)
    sizes = {"files": 1, "bytes": file.nbytes, "raw_bytes": file.raw_nbytes}
    print_either(
        {**said, **sizes, "left_out": _said({f"{one.name}: {one.reason}": None for one in read.skipped})},
        [f"{file.path}: {what}, {human_nbytes(file.nbytes)}"],
        as_json=as_json,
    )
    return code


def _say_how_much(chosen: list[Series], target: Path, to: str, as_json: bool) -> None:
    records, nbytes = sum(map(len, chosen)), sum(series.raw_bytes for series in chosen)
    # A table has statistics alone.
    size = "" if to == "parquet" else f", about {human_nbytes(nbytes)}"
    what = f"{human_count(records, 'record')} of {len(chosen):,} series{size}"
    said = f"{what}; nothing is written yet: -o {target} writes it"
    found = {"directory": None, "format": to, "records": records, "series": len(chosen), "raw_bytes": nbytes}
    print_either(found, prose([said], 2), as_json=as_json)


def _files(
    run_id: str,
    chosen: list[Series],
    out: Path,
    to: str,
    naming: Naming,
    jobs: int | None,
) -> Iterator[ExportedFile]:
    if to == "parquet":
        from capd.io.table import export_table

        return export_table(run_id, chosen, out)
    if to == "pt":
        from capd.pt_files.export import export_pt
        from capd.server.limits import usable_cpus

        return export_pt(run_id, chosen, out, naming, threads=jobs or max(1, round(usable_cpus())))
    from capd.io.arrays import export_arrays

    return export_arrays(run_id, chosen, out, f".{to}")


def _said(left_out: LeftOut) -> list[dict[str, Any]]:
    return [{"reason": reason, "records": records} for reason, records in left_out.items()]


def _report(
    written: Iterator[ExportedFile], chosen: Sequence[Sized], out: Path, to: str, left_out: LeftOut, *, as_json: bool
) -> None:  # fmt: skip
    """Write all files, then say what was written. `left_out` is complete at the end, and its new entries are noted."""
    files = records = nbytes = raw_nbytes = 0
    known = set(left_out)
    counted = {
        "parquet": (1, "tables"),
        "npz": (len(chosen), "series"),
        "safetensors": (len(chosen), "series"),
    }
    total, what = counted.get(to) or (sum(map(len, chosen)), "records")
    with Progress(total, what) as progress:
        for file in written:
            progress.add(file.raw_nbytes, 1 if to in counted else file.records)
            files, records = files + 1, records + file.records
            nbytes, raw_nbytes = nbytes + file.nbytes, raw_nbytes + file.raw_nbytes
    for reason, count in left_out.items():
        if reason not in known and count is not None:
            note(f"{human_count(count, 'record')} left out, because {reason}")
    where = {"directory": str(out), "format": to}
    found = {
        "files": files,
        "records": records,
        "bytes": nbytes,
        "raw_bytes": raw_nbytes,
        "left_out": _said(left_out),
    }
    of = f"{human_count(records, 'record')} in {human_count(files, 'file')}"
    print_either({**where, **found}, [f"{out}: {of}, {human_nbytes(nbytes)}"], as_json=as_json)
