"""`capd merge`: merges runs into a new run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capd.cli.completion import store_paths
from capd.cli.copying.copied_line import copied_line, errors_said
from capd.cli.options import Json, Wide, flag, local_path
from capd.cli.output import human_count, note, print_json
from capd.cli.table import Column, print_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from capd.copying.merge import Merged

__all__ = ["merge"]


def merge(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN…",
            help="The runs (NAME.zarr), in the order of their attempts.",
            show_default=False,
            parser=local_path,
            autocompletion=store_paths,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="NEW",
            help="The new run (NAME.zarr).",
            show_default=False,
            parser=local_path,
        ),
    ],
    dry_run: Annotated[bool, flag("--dry-run", "Write nothing; say what would be merged.")] = False,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Merge runs into the new run NEW. The runs are only read.

    The runs have different nodes or ranks of one job, or are jobs that continue each other. If a run repeats ranks
    and attempts of an earlier one, its attempts are counted on from there. A capture that two runs hold is taken
    once; if its bytes differ, nothing is merged.

    A series that only one run has takes no space on the same file system: its files get a second name. NEW does not
    exist before it is complete and every byte of it is checked. An interrupted merge is in a hidden directory beside
    NEW; the same command continues it.

    \b
    Examples:
      capd merge node0/exp7.zarr node1/exp7.zarr -o exp7.zarr
      capd merge monday.zarr tuesday.zarr -o both.zarr --dry-run

    \b
    Exit codes:
      1  two runs hold one capture with different bytes
      4  a record is damaged; `capd verify RUN --repair` saves the others
      5  no run has a record
      6  the disk is full
      7  another command writes NEW
    """
    from capd.copying.merge import merge_runs, planned_merge

    if dry_run:
        found = planned_merge(runs)
    else:
        with copied_line(output, "merged") as progress:
            found = merge_runs(runs, output, progress)
    if as_json:
        sources = [{**asdict(one), "run": str(one.run)} for one in found]
        print_json({"new": str(output), "written": not dry_run, "sources": sources})
        return
    print_columns(_columns(found), wide=wide)
    records = human_count(sum(one.records for one in found), "record")
    records += errors_said(sum(one.error_records for one in found))
    note(f"{output}: {records}; {'nothing is written (--dry-run)' if dry_run else 'merged and checked'}")


def _columns(found: Sequence[Merged]) -> list[Column]:
    def numbers(name: str, values: list[int], spare: int = 0) -> Column:
        return Column(name, [human_count(value) for value in values], right=True, spare=spare)

    return [
        Column("run", [str(one.run) for one in found], is_name=True),
        numbers("records", [one.records for one in found]),
        numbers("there already", [one.repeated for one in found], 3),
        numbers("linked series", [one.linked_series for one in found], 2),
        numbers("copied series", [one.copied_series for one in found], 2),
        Column("attempts", [f"+{one.shift}" if one.shift else "same" for one in found], right=True),
    ]
