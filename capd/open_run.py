"""A run as `capd.open` opens it: the Store, and the comparison of number formats on its tensors."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capd.errors import NothingMatched
from capd.store.objects.address import Address, place_of
from capd.store.read.series import import_extra
from capd.store.read.store import Store

if TYPE_CHECKING:
    from capd.io.items import NamedSeries, Skipped
    from capd.report.gather import GatheredRecords

__all__ = ["OpenRun", "open_run"]

# The damaged records that a warning names.
_NAMED = 3


class OpenRun(Store):
    """One run, read-only. It shows a snapshot, which `refresh()` updates."""

    def compare(
        self,
        formats: Sequence[str] = (),
        *,
        by: Sequence[str] = ("tensor_name",),
        threads: int = 2,
        client: Any = None,
        task_bytes: int = 256 << 20,
        **selection: Any,
    ) -> Any:
        """Return the errors of number formats on the captured tensors, as `capd compare` measures them.

        Args:
            formats: Formats such as "mxfp8" or "nvfp4:16x16" (docs/comparing.md). Without any, those of `capd compare`.
            by: The fields of keys and moments by which records are grouped.
            threads: The number of threads that read and measure.
            client: A `distributed.Client`, whose workers read and measure instead. They must see the run and have
                this capd. Only a client that is given is used.
            task_bytes: The size of the tasks of the client.
            **selection: The records, as in `find`.

        Returns:
            A pandas.DataFrame with one row for each group and format: the fields of `by`, `format`, `best`, and the
            counts and metrics of docs/json.md, such as `sqnr_db`. A warning names records that cannot be read.

        Raises:
            ConfigError: A format or a field is unknown.
            NothingMatched: No selected record has high precision.
            CapdError: The extra `table` is not installed, or the workers of the client cannot be used.
        """
        pd = import_extra("pandas", "table")
        # They need torch.
        from capd.analyze.format_choice import DEFAULT_FORMATS, choices
        from capd.analyze.groups import Groups, checked_fields
        from capd.io.items import items_of_series
        from capd.report.format_errors import COUNTS, METRICS, error_document
        from capd.report.gather import GatheredRecords, gather

        chosen, fields = choices(",".join(formats) or DEFAULT_FORMATS), checked_fields("by", by)
        gathered = GatheredRecords(groups=Groups({(): True, fields: True}))
        items = items_of_series((series.path, series) for series in self.find(**selection))
        if client is None:
            work: Iterator[Skipped | int] = gather(items.found, gathered, threads=threads, choices=chosen)
        else:
            work = self._gather_on(
                client, items.series or (), gathered, task_bytes, selection, choices=chosen
            )
        for _ in work:
            pass
        if not gathered.groups.whole().errors:
            reasons = [reason for _, reason in gathered.unmeasured] + [one.reason for one in gathered.skipped]
            said = "; ".join(dict.fromkeys(reasons)) or "the selection is empty"
            raise NothingMatched(f"no record with a high-precision source in {self.path}: {said}")
        if gathered.skipped:
            names = "; ".join(f"{one.name}: {one.reason}" for one in gathered.skipped[:_NAMED])
            warnings.warn(
                f"{len(gathered.skipped)} records of {self.path} are left out: {names}", stacklevel=2
            )
        document = error_document([str(self.path)], gathered, chosen, fields)
        return pd.DataFrame(
            {
                **{field: group[field] for field in fields},
                "format": label,
                "best": label == group["best"],
                **{name: errors[name] for name in (*COUNTS, *METRICS)},
            }
            for group in document["groups"] or [document["all"]]
            for label, errors in group["errors"].items()
        )

    def _gather_on(
        self,
        client: Any,
        series: Sequence[NamedSeries],
        gathered: GatheredRecords,
        task_bytes: int,
        selection: Mapping[str, Any],
        **asked: Any,
    ) -> Iterator[Skipped | int]:
        """Gather the records of some series on the workers of a client."""
        from capd.distributed.cluster.checks import check_memory
        from capd.distributed.cluster.gathering import gather_on
        from capd.distributed.cluster.opening import engine_of
        from capd.distributed.tasks.planning import place_text, planned
        from capd.distributed.tasks.question import Question

        question = Question.of(gathered, 1.0, **asked)
        plan = planned(series, question, task_bytes, selection.get("attempt", "latest"))
        engine = engine_of(client, [place_text(self.path)])
        check_memory(plan.largest, plan.largest_name, engine.memory_limit)
        return gather_on(engine, plan, gathered)


def open_run(place: str | os.PathLike[str] | Address) -> OpenRun:
    """Open a run directory, or a run in an object store, such as s3://bucket/runs/exp7.zarr.

    Raises:
        NotAStore: There is no run.
        ConfigError: It is an address that is not valid.
    """
    return OpenRun(place_of(place))
