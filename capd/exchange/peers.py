"""The registry of the tools that capd exchanges files with. A tool's modules are imported when they are needed.

A module that writes has `export_files(request)`, which yields each ExportedFile when it is whole. A module that reads
has `recognises(directory)`, which reads no tensor, and `found_in(directory)`, which returns an `ImportSet`.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from capd.output_directory import ExportedFile

if TYPE_CHECKING:
    from capd.pt_files.files import ImportSource
    from capd.pt_files.writer import ImportedRecord
    from capd.store.read.scalars import Scalar
    from capd.store.read.series import Series

__all__ = ["PEERS", "ExchangePeer", "ExportRequest", "ImportSet", "export_for", "found_by_a_peer"]


class ExchangePeer(NamedTuple):
    """A tool: the module that writes its files and the module that reads them; "" if there is none."""

    writer: str = ""
    reader: str = ""


PEERS: dict[str, ExchangePeer] = {
    "msprobe": ExchangePeer("capd.exchange.msprobe.export", "capd.exchange.msprobe.import_"),
    "sglang": ExchangePeer("capd.exchange.sglang.export"),
    "tensorboard": ExchangePeer("capd.exchange.tensorboard.export"),
}
"""The tools by the name that `capd export --to` takes."""


@dataclass(frozen=True)
class ExportRequest:
    """An export: the run's id, the series with their chosen records, the directory, and options of single tools.

    Attributes:
        repeat_weights: msprobe: write a weight for every call, not only for the call that captured it.
        scalars: Reads the scalars that were chosen, too.
        left_out: The numbers of records that the tool has no word for, by reason. The writer fills it.
    """

    run_id: str
    chosen: Sequence[Series]
    out: Path
    repeat_weights: bool = False
    scalars: Callable[[], Sequence[Scalar]] = tuple
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class ImportSet:
    """The tensors of a foreign dump: each call of `sources` gives them anew, in order; `load` reads one of them."""

    peer: str
    sources: Callable[[], Iterable[ImportSource]]
    load: Callable[[Any], ImportedRecord]


def export_for(name: str, request: ExportRequest) -> Iterator[ExportedFile]:
    """Write the files of the tool `name`, and yield each when it is whole. Raises as the tool's writer does."""
    written: Iterator[ExportedFile] = importlib.import_module(PEERS[name].writer).export_files(request)
    return written


def found_by_a_peer(directory: Path) -> ImportSet | None:
    """Return what the first tool that recognises the directory finds in it, or None."""
    for peer in PEERS.values():
        if peer.reader:
            reader = importlib.import_module(peer.reader)
            if reader.recognises(directory):
                found: ImportSet = reader.found_in(directory)
                return found
    return None
