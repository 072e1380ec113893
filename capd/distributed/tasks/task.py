"""Tasks: records of one or several series, whole shards if they fit, and a question to them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from capd._version import __version__
from capd.distributed.tasks.question import Question
from capd.errors import ConfigError

__all__ = ["AnalysisTask", "TaskPart", "TaskPlan", "task_of"]


class TaskPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records of one shard of a series.

    Attributes:
        run: The path or the address of the run.
        run_id: Its id.
        series: The path of the series in the run.
        first, last: The records: their places in the series, the last one excluded.
        bytes: Their elements in bytes.
        numbers: The numbers of the first and the last record in the array, empty if the series cannot be read.
        node: The node that wrote the series.
        attempt: As in `Store.find`.
        name: The name of the series in messages.
        turn, of: The number of the series, and of its records, which decide what a sample takes.
        place: The number of the series' key and dtype, and of its first record among theirs (`Item.place`).
        label: The name of the run before the quant type, or "".
    """

    run: str
    run_id: str = ""
    series: str
    first: int
    last: int
    bytes: int
    numbers: tuple[int, ...] = ()
    node: str = ""
    attempt: int | str = "latest"
    name: str = ""
    turn: int = 0
    of: int = 0
    place: tuple[int, int] = (0, 0)
    label: str = ""

    @property
    def shown(self) -> str:
        """The part in messages."""
        name = f"{self.label}/{self.name}" if self.label else self.name
        return f"{name}#{'-'.join(map(str, dict.fromkeys(self.numbers)))}" if self.numbers else name


class AnalysisTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task.

    Attributes:
        plan: The identity of its plan. Partial results of different plans do not merge.
        task: Its number in the plan.
        bytes: The elements of its records in bytes.
    """

    plan: str
    task: int
    bytes: int
    question: Question
    parts: tuple[TaskPart, ...]

    def each_part(self) -> Iterator[AnalysisTask]:
        """Yield a task for each part."""
        for part in self.parts:
            yield msgspec.structs.replace(self, bytes=part.bytes, parts=(part,))


class TaskPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All tasks of a question.

    Attributes:
        largest: The bytes of the largest record.
        largest_name: The series that has it.
    """

    identity: str
    question: Question
    tasks: tuple[AnalysisTask, ...]
    largest: int = 0
    largest_name: str = ""

    @classmethod
    def of(
        cls, question: Question, parts: Sequence[Sequence[TaskPart]], largest: tuple[int, str]
    ) -> TaskPlan:
        """Return the plan whose tasks have these parts."""
        # Results of different versions do not merge.
        encoded = msgspec.json.encode([__version__, question, parts], order="deterministic")
        identity = hashlib.sha256(encoded).hexdigest()[:32]
        tasks = tuple(
            AnalysisTask(
                plan=identity,
                task=number,
                bytes=sum(part.bytes for part in each),
                question=question,
                parts=tuple(each),
            )
            for number, each in enumerate(parts)
        )
        return cls(
            identity=identity, question=question, tasks=tasks, largest=largest[0], largest_name=largest[1]
        )

    @property
    def nbytes(self) -> int:
        """The elements of all records in bytes."""
        return sum(task.bytes for task in self.tasks)


def task_of(task: AnalysisTask | Mapping[str, Any] | str | bytes) -> AnalysisTask:
    """Return a task that is given as one, as JSON, or as what JSON contains.

    Raises:
        ConfigError: It is no task.
    """
    try:
        if isinstance(task, (str, bytes)):
            return msgspec.json.decode(task, type=AnalysisTask)
        return task if isinstance(task, AnalysisTask) else msgspec.convert(task, AnalysisTask)
    except msgspec.ValidationError as error:
        raise ConfigError(f"this is no task of `capd plan-tasks`: {error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"this is no task of `capd plan-tasks`, but no JSON: {error}") from error
