"""The export of `capd export` by the workers of a cluster."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from capd.cli.scheduling import ClusterOptions
from capd.pt_files.dictionary import Naming

if TYPE_CHECKING:
    from capd.output_directory import ExportedFile
    from capd.store.read.series import Series
    from capd.store.read.store import Store

__all__ = ["ClusterExport"]


@dataclass(frozen=True)
class ClusterExport:
    """An export on a cluster: the format, the attempts of the records, their names, and the number of processes."""

    cluster: ClusterOptions
    to: str
    attempt: int | str
    naming: Naming
    jobs: int | None

    @contextlib.contextmanager
    def files(self, opened: Store, chosen: Sequence[Series], out: Path) -> Iterator[Iterator[ExportedFile]]:
        """Give the files of some series of a run, each when it is whole. Raises as `ClusterOptions.engine` does."""
        from capd.distributed.tasks.exports import ExportPlan
        from capd.distributed.tasks.planning import place_text
        from capd.server.limits import usable_cpus
        from capd_client.protocol.dtypes import ITEM_NBYTES

        self.cluster.refuse_checkpoint("an export")
        task_nbytes = self.cluster.task_nbytes
        largest = max((prod(one.shape[1:]) * ITEM_NBYTES[one.dtype], one.path) for one in chosen)
        workers = self.jobs or max(1, round(usable_cpus()))
        shared = ExportPlan(uuid.uuid4().hex, opened.run_id, self.attempt, self.naming)
        with self.cluster.engine(workers, [place_text(opened.path)], largest) as engine:
            from capd.distributed.cluster.exporting import export_arrays_on, export_pt_on

            if self.to == "pt":
                yield export_pt_on(engine, shared, chosen, out, task_nbytes)
            else:
                yield export_arrays_on(engine, shared, chosen, out, f".{self.to}")
