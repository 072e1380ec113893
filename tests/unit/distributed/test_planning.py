"""Plans: whole shards where they fit, every record once, and a run that changed is noticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from capd.distributed.tasks.planning import planned, size_of
from capd.distributed.tasks.question import Question
from capd.distributed.tasks.reading import items_of_task
from capd.distributed.tasks.task import TaskPlan
from capd.errors import ConfigError, StoreError
from capd.io.items import items_of_runs
from capd_client.protocol.key import Moment
from tests.kit.cluster.sources import varied_run
from tests.kit.store.cli import StoreWriter, linear_key


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return varied_run(tmp_path_factory.mktemp("planned"))


def plan_of(run: Path, task_nbytes: int) -> TaskPlan:
    series = items_of_runs([run], []).series
    assert series is not None
    return planned(series, Question(), task_nbytes)


@pytest.mark.parametrize("task_nbytes", [1024, 5000, 100_000, 1 << 30])
def test_every_record_is_in_one_task_in_order(run: Path, task_nbytes: int) -> None:
    plan = plan_of(run, task_nbytes)

    names = [item.name for task in plan.tasks for item in items_of_task(task)]

    assert names == [item.name for item in items_of_runs([run], []).found]
    assert all(task.bytes <= task_nbytes or len(task.parts) == 1 for task in plan.tasks)
    assert (len(plan.tasks) == 1) == (task_nbytes == 1 << 30)
    assert plan.largest == 32 * 64 * 2
    assert plan.largest_name.endswith("forward.weight")


def test_the_same_records_and_question_give_the_same_plan_and_others_another(
    run: Path, tmp_path: Path
) -> None:
    other = varied_run(tmp_path, "other")

    assert plan_of(run, 5000) == plan_of(run, 5000)
    identities = {plan_of(run, 5000).identity, plan_of(run, 60_000).identity, plan_of(other, 5000).identity}
    assert len(identities) == 3


def test_a_run_that_is_not_what_it_was_is_refused(tmp_path: Path) -> None:
    def written(root: Path, records: int, **key: object) -> Path:
        writer = StoreWriter(root)
        for iteration in range(records):
            writer.put(
                "run", linear_key(**key), np.ones((2, 2), np.float32), "float32", Moment(iteration=iteration)
            )
        writer.close()
        return root / "run.zarr"

    [task] = plan_of(written(tmp_path / "a", 3), 1 << 20).tasks
    for place, records, key, message in (
        ("b", 2, {}, "other records"),
        ("c", 3, {"layer": 7}, "no series"),
    ):
        (tmp_path / "a").rename(tmp_path / f"before {place}")
        written(tmp_path / "a", records, **key)
        # Another plan's identity, as the process keeps the runs that it opened for one.
        changed = type(task)(plan=place, task=0, bytes=0, question=task.question, parts=task.parts)
        with pytest.raises(StoreError, match=message):
            list(items_of_task(changed))


@pytest.mark.parametrize("text", ["1KB", "0", "1TiB", "many", "-5MiB"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--task-bytes"):
        size_of("--task-bytes", text)
