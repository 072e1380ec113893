"""`capd cp`: copies a run, or a part of it, into a new run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capd.cli.completion import any_of, series_paths, store_paths
from capd.cli.copying.copied_line import copied_line, errors_said
from capd.cli.options import Json, flag, option
from capd.cli.output import human_count, human_nbytes, print_either
from capd.cli.stores import Given, attempt_of
from capd.cli.table import prose
from capd.errors import ConfigError
from capd.store.objects.address import Address, is_address, place_of

__all__ = ["cp"]


def _new_path(text: str) -> Path:
    if is_address(text):
        raise ConfigError(f"{text} is in an object store; `capd upload RUN {text}` brings a run there")
    return Path(text)


def cp(
    source: Annotated[
        Given,
        typer.Argument(
            metavar="SRC",
            help="The run (NAME.zarr), or its address, as s3://BUCKET/KEY.",
            show_default=False,
            parser=place_of,
            autocompletion=store_paths,
        ),
    ],
    new: Annotated[
        Path,
        typer.Argument(
            metavar="DST",
            help="The new run (NAME.zarr), or a directory for it.",
            show_default=False,
            parser=_new_path,
        ),
    ],
    series: Annotated[
        list[str] | None,
        option(
            "--series",
            "GLOB",
            "Copy only series whose paths match. May be given several times.",
            show_default=False,
            autocompletion=series_paths,
        ),
    ] = None,
    attempt: Annotated[
        str,
        option(
            "--attempt",
            "N|latest|all",
            "Copy the records of one attempt; latest: of records at one moment only the newest.",
            autocompletion=any_of("latest", "all"),
        ),
    ] = "all",
    iterations: Annotated[
        str, option("--iterations", "RANGES", "Copy only records of these iterations, as 0-2,100-:100.")
    ] = "all",
    statistics_only: Annotated[
        bool, flag("--stats-only", "Keep only the statistics of tensors. Scalars stay as they are.")
    ] = False,
    recode: Annotated[
        str | None,
        option("--recode", "CODEC", "Compress the tensors again, as zstd:9; the codecs of `capd serve`."),
    ] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Write nothing; say what would be copied.")] = False,
    as_json: Json = False,
) -> None:
    """Copy a run into the new run DST, bit for bit. SRC is only read.

    DST does not exist before the copy is complete and every byte of it is checked. An interrupted copy is in a
    hidden directory beside DST; the same command continues it.

    From an object store, the files and the counters come back as they were uploaded.

    Without options the files are copied as they are. With one of them, while a daemon owns the store of SRC, and if
    shards of SRC were moved to an object store, the records that SRC has now are copied one by one.

    \b
    Examples:
      capd cp captures/exp7.zarr /archive/exp7.zarr
      capd cp s3://bucket/runs/exp7.zarr captures/exp7.zarr
      capd cp captures/exp7.zarr small.zarr --stats-only
      capd cp captures/exp7.zarr thin.zarr --iterations 0-:100
      capd cp captures/exp7.zarr mlp.zarr --series "*.mlp.*" --recode zstd:9

    \b
    Exit codes:
      4  a record of SRC is damaged; `capd verify SRC --repair` saves the others
      5  nothing matches
      6  the disk is full
      7  another command writes DST
    """
    from capd.copying.copy import CopyOptions, copy_run, planned_copy
    from capd.server.limits import usable_cpus
    from capd.store.format.codecs import parse_codec

    if recode is not None and recode not in ("auto", "default", "fast", "none"):
        parse_codec(recode)
    if isinstance(source, Address) and new.suffix != ".zarr" and new.is_dir():
        new /= source.name
    part = CopyOptions(tuple(series or ()), attempt_of(attempt), iterations.strip(), statistics_only, recode)
    if dry_run:
        found = planned_copy(source, part)
    else:
        with copied_line(new, "copied") as progress:
            found = copy_run(source, new, part, progress, max(1, round(usable_cpus())))
    document = {
        "source": str(source), "new": str(new), "written": not dry_run, "series": found.series,
        "records": found.records, "error_records": found.error_records, "raw_bytes": found.raw_bytes,
        "files": found.files,
    }  # fmt: skip
    what = f"{human_count(found.records, 'record')} of {found.series:,} series, {human_nbytes(found.raw_bytes)} raw"
    what += errors_said(found.error_records)
    how = f", in {human_count(found.files, 'file')}" if found.files else ""
    end = "nothing is written (--dry-run)" if dry_run else "copied and checked"
    print_either(document, prose([f"{new}: {what}{how}; {end}"], 2), as_json=as_json)
