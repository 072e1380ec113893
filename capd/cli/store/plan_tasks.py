"""`capd plan-tasks`: prints the tasks that any engine can run with `capd.run_task`."""

from __future__ import annotations

from typing import Annotated

from capd.analyze.format_choice import DEFAULT_FORMATS
from capd.cli.completion import field_lists, format_lists
from capd.cli.options import Json, grouped, option
from capd.cli.output import human_count, human_nbytes, print_json, print_lines
from capd.cli.scheduling import TaskBytes, task_size
from capd.cli.sources import SourceOptions, found_in
from capd.cli.stores import StoreArgument, default_store

__all__ = ["plan_tasks"]


@grouped
def plan_tasks(
    store: StoreArgument = None,
    task_bytes: TaskBytes = None,
    *,
    source: SourceOptions,
    formats: Annotated[
        str,
        option(
            "--formats",
            "LIST",
            "Number formats to measure, as mxfp8,nvfp4:16x16,hifp8; or none.",
            autocompletion=format_lists,
        ),
    ] = DEFAULT_FORMATS,
    by: Annotated[
        str, option("--by", "FIELDS", "Group by these, as layer,tensor_name.", autocompletion=field_lists)
    ] = "tensor_name",
    as_json: Json = False,
) -> None:
    """Print the tasks of a comparison of formats, for Ray, Spark or any other engine.

    Each task names whole shards of some series, about --task-bytes. `capd.run_task(task)` runs one where the run can
    be read, and returns bytes. `capd.merge_partials(results)` merges them in any order, and what occurs twice counts
    once. `capd.partial_document(result)` has the errors. Nothing is read but the catalog.

    \b
    Examples:
      capd plan-tasks captures --json
      capd plan-tasks captures --by layer --task-bytes 512MiB --json

    \b
    Exit codes:
      2  an unknown format, field or size
      5  nothing matches
    """
    from capd.analyze.format_choice import choices
    from capd.analyze.groups import Groups, checked_fields
    from capd.report.gather import GatheredRecords

    nbytes = task_size(task_bytes)
    fields = () if by == "none" else checked_fields("--by", (word.strip() for word in by.split(",")))
    chosen = () if formats == "none" else choices(formats)
    found = found_in(default_store() if store is None else store, source)
    gathered = GatheredRecords(groups=Groups({(): True, fields: True}))
    plan = found.plan(gathered, nbytes, choices=chosen)
    if as_json:
        import msgspec

        print_json(
            {
                "plan": plan.identity,
                "runs": found.names,
                "bytes": plan.nbytes,
                "largest_record_bytes": plan.largest,
                "tasks": msgspec.to_builtins(plan.tasks),
            }
        )
        return
    largest = max((task.bytes for task in plan.tasks), default=0)
    said = f"{human_count(len(plan.tasks), 'task')}, {human_nbytes(plan.nbytes)}, the largest {human_nbytes(largest)}"
    print_lines([f"{', '.join(found.names)}: {said}; --json prints them for `capd.run_task`"])
