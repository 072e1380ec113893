"""The tool that wrote the files of a directory, by their names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from capd.exchange.foreign import ForeignFile
from capd.exchange.megatron.import_ import megatron_files
from capd.exchange.megatron.layers import PipelineLayout
from capd.exchange.nvdlfw.import_ import nvdlfw_logs
from capd.exchange.sglang.import_ import sglang_files

__all__ = ["TOOLS", "Tool", "peer_files"]

Tool = Literal["msprobe", "sglang", "megatron", "nvdlfw"]
TOOLS: tuple[Tool, ...] = get_args(Tool)
"""The tools whose files are recognised. `capd.exchange.peers` reads dumps of msprobe."""


def peer_files(
    root: Path, peer: Tool | None, pipeline: PipelineLayout
) -> tuple[Tool, Sequence[ForeignFile]] | None:
    """Return the tool that wrote the files below `root`, and these files. None if there is no file of a known tool.

    Args:
        root: The directory.
        peer: The only tool to look for, None for all.
        pipeline: The layout of a job of Megatron.

    Raises:
        OSError: If `root` cannot be read.
    """
    for name in TOOLS if peer is None else (peer,):
        found: Sequence[ForeignFile]
        if name == "sglang":
            found = sglang_files(root)
        elif name == "megatron":
            found = megatron_files(root, pipeline)
        elif name == "nvdlfw":
            found = nvdlfw_logs(root)
        else:
            continue
        if found:
            return name, found
    return None
