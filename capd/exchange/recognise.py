"""The tool that wrote the files of a directory, and how they are imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from capd.errors import NothingMatched
from capd.exchange.foreign import ForeignFile, import_foreign
from capd.exchange.megatron.import_ import megatron_files
from capd.exchange.megatron.layers import PipelineLayout
from capd.exchange.msprobe.dumps import find_dumps
from capd.exchange.msprobe.import_ import dumped_tensors, load_dumped
from capd.exchange.nvdlfw.import_ import nvdlfw_logs
from capd.exchange.sglang.import_ import sglang_files
from capd.pt_files.import_ import Outcome, import_files

__all__ = ["TOOLS", "FoundFiles", "Tool", "found_files"]

Tool = Literal["msprobe", "sglang", "megatron", "nvdlfw"]
TOOLS: tuple[Tool, ...] = get_args(Tool)
"""The tools whose files are recognised."""


class FoundFiles(NamedTuple):
    """What is to import.

    Attributes:
        tool: The tool that wrote it.
        number: The number of files; of a dump of msprobe, of tensors that it names.
        read: Imports all into a run, as `import_files` does: `read(run, threads=…, limit=…)`.
    """

    tool: str
    number: int
    read: Callable[..., Iterator[Outcome]]


def found_files(root: Path, tool: Tool | None, pipeline: PipelineLayout) -> FoundFiles | None:
    """Return the files below `root` that a known tool wrote, of the first tool that has some. None if there are none.

    Args:
        root: The directory.
        tool: The only tool to look for, None for all.
        pipeline: The layout of a job of Megatron.

    Raises:
        OSError: If `root` cannot be read.
        NothingMatched: A dump names no tensor.
    """
    for name in TOOLS if tool is None else (tool,):
        found = _FINDERS[name](root, pipeline)
        if found is not None:
            return found
    return None


def _foreign(name: Tool, files: Sequence[ForeignFile]) -> FoundFiles | None:
    return (
        FoundFiles(name, len(files), lambda run, **how: import_foreign(run, files, **how)) if files else None
    )


def _msprobe(root: Path, _: PipelineLayout) -> FoundFiles | None:
    dumps = find_dumps(root)
    if not dumps:
        return None
    number = sum(1 for _ in dumped_tensors(dumps))
    if not number:
        raise NothingMatched(f"the msprobe dump in {root} names no tensor")
    return FoundFiles(
        "msprobe",
        number,
        lambda run, **how: import_files(run, dumped_tensors(dumps), load=load_dumped, **how),
    )


_FINDERS: Mapping[Tool, Callable[[Path, PipelineLayout], FoundFiles | None]] = {
    "msprobe": _msprobe,
    "sglang": lambda root, _: _foreign("sglang", sglang_files(root)),
    "megatron": lambda root, pipeline: _foreign("megatron", megatron_files(root, pipeline)),
    "nvdlfw": lambda root, _: _foreign("nvdlfw", nvdlfw_logs(root)),
}
