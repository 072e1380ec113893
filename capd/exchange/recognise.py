"""The tool that wrote the files of a directory, and how they are imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from capd.errors import ConfigError, NothingMatched
from capd.exchange.foreign import ForeignFile, import_foreign
from capd.exchange.megatron.import_ import megatron_files, saved_files
from capd.exchange.megatron.layers import PipelineLayout
from capd.exchange.megatron.ranks import AxisSizes
from capd.exchange.msprobe.dumps import TENSORS, Dump, find_dumps
from capd.exchange.msprobe.import_ import dumped_tensors, load_dumped
from capd.exchange.nvdlfw.import_ import nvdlfw_logs
from capd.exchange.sglang.import_ import SglangFile, sglang_files
from capd.pt_files.files import TensorFile, find_files
from capd.pt_files.import_ import Outcome, import_files, load_file

__all__ = ["TOOLS", "FileFacts", "FoundFiles", "Tool", "found_files"]

Tool = Literal["msprobe", "sglang", "megatron", "nvdlfw", "pt"]
TOOLS: tuple[Tool, ...] = get_args(Tool)
"""The tools whose files are recognised. "pt" is tensor_saver, or capd itself: every other .pt file."""


class FileFacts(NamedTuple):
    """What files do not say themselves.

    Attributes:
        layer_base: The number of the first layer in files of tensor_saver.
        sizes, pipeline: The layout of a job of Megatron.
    """

    layer_base: int
    sizes: AxisSizes
    pipeline: PipelineLayout


class FoundFiles(NamedTuple):
    """What is to import.

    Attributes:
        tool: The tool that wrote it.
        files: The number of files that were found by their names; of msprobe, each dump.json.
        records: The number of records in them, None if only reading tells.
        read: Imports all into a run, as `import_files` does: `read(run, threads=…, limit=…)`.
    """

    tool: Tool
    files: int
    records: int | None
    read: Callable[..., Iterator[Outcome]]


def found_files(root: Path, tool: Tool | None, facts: FileFacts) -> FoundFiles:
    """Return the files below `root` that a known tool wrote.

    Args:
        root: The directory.
        tool: The only tool to look for, None for all.
        facts: What files do not say themselves.

    Raises:
        OSError: If `root` cannot be read.
        NothingMatched: No file is found, or a dump names no tensor.
        ConfigError: Several tools wrote files there, or what the user said contradicts them.
    """
    found = {name: files for name, files in _by_tool(root, tool).items() if files}
    if len(found) > 1:
        counted = ", ".join(f"{name} ({len(files):,})" for name, files in found.items())
        raise ConfigError(
            f"{root} has files of several tools: {counted}; import each with --from TOOL into its own --run-id"
        )
    if not found:
        if tool is None:
            raise NothingMatched(
                f"no .pt, .pth or .pkl file in {root}, and no file of {', '.join(TOOLS[:-1])} (docs/exchange.md)"
            )
        raise NothingMatched(
            f"no file of {tool} in {root}; without --from, capd finds the tool by the files' names"
        )
    [(name, files)] = found.items()
    return _READERS[name](root, files, facts)


def _by_tool(root: Path, only: Tool | None) -> dict[Tool, Sequence[Any]]:
    """Return the files of each tool, of one tool alone if only that is wanted."""
    finders: dict[Tool, Callable[[], Sequence[Any]]] = {
        "msprobe": lambda: find_dumps(root),
        "sglang": lambda: sglang_files(root),
        "megatron": lambda: saved_files(root),
        "nvdlfw": lambda: nvdlfw_logs(root),
    }
    if only is not None and only != "pt":
        return {only: finders[only]()}
    found = {name: find() for name, find in finders.items()}
    others = _other_files(root, found)
    return {"pt": others} if only == "pt" else {**found, "pt": others}


def _other_files(root: Path, found: dict[Tool, Sequence[Any]]) -> list[TensorFile]:
    """Return the tensor files that no other tool wrote."""
    claimed = {one.file for one in found["sglang"]} | set(found["megatron"])
    data = {dump.directory / TENSORS for dump in found["msprobe"]}
    return [file for file in find_files(root) if file not in claimed and file.directory not in data]


def _read_dumps(root: Path, dumps: Sequence[Dump], _: FileFacts) -> FoundFiles:
    known = (dump for dump in dumps if not dump.problem)
    _must_be_one_job((f"step {dump.iteration} of rank {dump.rank}", dump.directory) for dump in known)
    records = sum(1 for _ in dumped_tensors(dumps))
    if not records:
        raise NothingMatched(f"the msprobe dump in {root} names no tensor")
    return FoundFiles(
        "msprobe",
        len(dumps),
        records,
        lambda run, **how: import_files(run, dumped_tensors(dumps), load=load_dumped, **how),
    )


def _read_dumper(_: Path, files: Sequence[SglangFile], __: FileFacts) -> FoundFiles:
    _must_be_one_job(
        (f"dump_index {one.order[1]} of rank {one.order[0]}", one.file.directory) for one in files
    )
    return _read_foreign("sglang", files, len(files))


def _must_be_one_job(places: Iterable[tuple[str, Path]]) -> None:
    """Raise ConfigError if two directories have files of one place, because two jobs would become one run."""
    known: dict[str, Path] = {}
    for place, directory in places:
        first = known.setdefault(place, directory)
        if first != directory:
            raise ConfigError(
                f"{first} and {directory} both have {place}, so they are of two jobs; import each by itself"
            )


def _read_saver(_: Path, files: Sequence[TensorFile], facts: FileFacts) -> FoundFiles:
    load = partial(load_file, layer_base=facts.layer_base)
    return FoundFiles(
        "pt", len(files), len(files), lambda run, **how: import_files(run, files, load=load, **how)
    )


def _read_foreign(tool: Tool, files: Sequence[ForeignFile], records: int | None) -> FoundFiles:
    return FoundFiles(tool, len(files), records, lambda run, **how: import_foreign(run, files, **how))


_READERS: dict[Tool, Callable[[Path, Sequence[Any], FileFacts], FoundFiles]] = {
    "msprobe": _read_dumps,
    "sglang": _read_dumper,
    "megatron": lambda _, files, facts: _read_foreign(
        "megatron", megatron_files(files, facts.sizes, facts.pipeline), None
    ),
    "nvdlfw": lambda _, files, __: _read_foreign("nvdlfw", files, None),
    "pt": _read_saver,
}
