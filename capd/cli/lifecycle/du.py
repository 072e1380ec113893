"""`capd du`: counts the disk space of runs, series and the trash."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capd.cli.completion import lists_of, store_paths
from capd.cli.options import Json, Wide, flag, local_path, option
from capd.cli.output import human_count, human_nbytes, note, print_json
from capd.cli.stores import default_store, is_run
from capd.cli.table import Column, in_one_unit, print_columns
from capd.errors import CapdError, ConfigError, NotAStore
from capd_client.process.text import human_value

if TYPE_CHECKING:
    from capd.lifecycle.inventory import RunFacts
    from capd.lifecycle.usage import Usage

__all__ = ["du"]

_BY = ("run", "quant_type", "rank", "layer", "tensor_name")


def du(
    store: Annotated[
        Path | None,
        typer.Argument(
            metavar="[STORE]",
            help="A run, or a directory of runs. Default: CAPD_STORE, or store in capd.toml, or captures.",
            show_default=False,
            parser=local_path,
            autocompletion=store_paths,
        ),
    ] = None,
    by: Annotated[
        str,
        option(
            "--by", "FIELDS", f"Count by these, with commas: {', '.join(_BY)}.", autocompletion=lists_of(*_BY)
        ),
    ] = "run",
    check: Annotated[
        bool, flag("--check", "Walk the directories, too, and show what the disk holds.")
    ] = False,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Count the disk space of runs, from their catalogs.

    `stored` is what records take, with their frames; by run also logs and catalogs. `moved` is what is in an object
    store alone (delete_local in [upload]). `files` is how many files a sealed run has. `reclaimable` is what `capd gc`
    frees inside of runs. With --check, `on disk` is what the directories of the runs hold. It is more than `stored`,
    because a shard that was continued keeps the bytes of replaced chunks, and documents take space.

    \b
    Examples:
      capd du
      capd du captures --by quant_type,tensor_name
      capd du captures/run.zarr --check --json
    """
    fields = [word.strip() for word in by.split(",")]
    unknown = [word for word in fields if word not in _BY]
    if unknown or len(set(fields)) != len(fields):
        raise ConfigError(f"--by {by!r} is not a list of different fields; use some of {', '.join(_BY)}")
    if check and fields != ["run"]:
        raise ConfigError("--check counts the directories of runs; leave out --by")
    from capd.lifecycle.usage import usage_by

    found, root = _runs(store)
    readable: list[RunFacts] = []
    for one in found:
        if one.state in ("unreadable", "removing"):
            note(f"{one.path} is left out: {one.problem or 'it is being removed'}")
        else:
            readable.append(one)
    groups = usage_by(readable, fields)
    on_disk = _walk(readable) if check else {}
    trash = _trash(root)
    if as_json:
        plain = [
            {**names, **asdict(usage), **_walked(names, on_disk), **_place(names, readable)}
            for names, usage in groups
        ]
        print_json({"by": fields, "groups": plain, "trash_bytes": trash})
        return
    if not groups:
        note(f"no records in {store or root}")
    print_columns(_columns(groups, on_disk), wide=wide)
    stored = sum(usage.stored_bytes for _, usage in groups)
    moved = sum(usage.moved_bytes for _, usage in groups)
    elsewhere = f", {human_nbytes(moved)} in an object store alone" if moved else ""
    held = f"; {human_nbytes(trash)} in the trash, which `capd gc` frees" if trash else ""
    note(f"{human_count(len(readable), 'run')}, {human_nbytes(stored)} stored{elsewhere}{held}")


def _runs(store: Path | None) -> tuple[list[RunFacts], Path | None]:
    """Return the runs that STORE means, and their directory if it means all of it."""
    from capd.lifecycle.inventory import inventory, look_at
    from capd.store.documents.zarr_json import run_attributes

    place = default_store() if store is None else store
    if is_run(place):
        run_attributes(place)
        return [look_at(place)], None
    found = inventory(place)
    if not found:
        raise NotAStore(f"no run in {place}; name a run or a directory of runs")
    return found, place


def _walk(runs: list[RunFacts]) -> dict[str, tuple[int, int]]:
    from capd.lifecycle.usage import walked

    return {one.run_id: walked(one.path) for one in runs}


def _walked(names: dict[str, Any], on_disk: dict[str, tuple[int, int]]) -> dict[str, int]:
    if names.get("run") not in on_disk:
        return {}
    files, nbytes = on_disk[names["run"]]
    return {"disk_files": files, "disk_bytes": nbytes}


def _place(names: dict[str, Any], runs: list[RunFacts]) -> dict[str, str]:
    """Return where a run is uploaded to, if a group is a run."""
    if list(names) != ["run"]:
        return {}
    return {"uploaded_to": next(one.uploaded_to for one in runs if one.run_id == names["run"])}


def _trash(root: Path | None) -> int:
    from capd.lifecycle.trash import entries

    if root is None:
        return 0
    try:
        return sum(entry.nbytes for entry in entries(root))
    except (OSError, CapdError) as error:
        note(f"the trash of {root} cannot be read: {error}")
        return 0


def _columns(groups: list[tuple[dict[str, Any], Usage]], on_disk: dict[str, tuple[int, int]]) -> list[Column]:
    fields = list(groups[0][0]) if groups else ["run"]
    columns = [
        Column(field, [human_value(names[field]) for names, _ in groups], is_name=True) for field in fields
    ]
    usages = [usage for _, usage in groups]
    columns.append(Column("records", [human_count(usage.records) for usage in usages], right=True, spare=2))
    for name, spare in (("raw", 3), ("stored", 0), ("moved", 0), ("reclaimable", 1)):
        if name == "reclaimable" and fields != ["run"]:
            continue
        if name == "moved" and not any(usage.moved_bytes for usage in usages):
            continue
        unit, sizes = in_one_unit([getattr(usage, f"{name}_bytes") for usage in usages])
        columns.append(Column(f"{name} {unit}", sizes, right=True, spare=spare))
    if on_disk:
        unit, sizes = in_one_unit([on_disk[names["run"]][1] for names, _ in groups])
        columns.append(Column(f"on disk {unit}", sizes, right=True))
    columns.append(Column("files", [human_count(usage.files) for usage in usages], right=True, spare=4))
    return columns
