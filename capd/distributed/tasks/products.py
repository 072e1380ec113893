"""The product errors of a call of a linear layer as a task: its operands are read again where it runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from capd.analyze.error_sums import Errors
from capd.analyze.format_choice import choices
from capd.analyze.packed.codec import pack, unpack
from capd.distributed.tasks.reading import reader_of
from capd.io.items import Skipped
from capd.report.products.linear_calls import Call, Operand
from capd.report.products.product_errors import Result, measure_call

__all__ = ["call_bytes", "call_result", "run_call"]


class _CallTask(NamedTuple):
    plan: str
    formats: list[str]
    operands: list[Operand]


class _CallResult(NamedTuple):
    errors: dict[str, dict[str, Errors]] | None
    skipped: Skipped | None


def call_bytes(plan: str, formats: Sequence[str], call: Call) -> bytes:
    """Return the task that measures a call in some formats."""
    return pack(_CallTask(plan, list(formats), list(call)), _CallTask)


def run_call(task: bytes) -> bytes:
    """Run a task of `call_bytes`."""
    one = unpack(task, _CallTask)
    call = Call(*(operand.read_by(partial(reader_of, one.plan)) for operand in one.operands))
    found = measure_call(call, choices(",".join(one.formats)))
    if isinstance(found, Skipped):
        return pack(_CallResult(None, found), _CallResult)
    errors = None if found is None else {label: dict(each) for label, each in found.items()}
    return pack(_CallResult(errors, None), _CallResult)


def call_result(found: bytes) -> Result:
    """Return what `run_call` found."""
    one = unpack(found, _CallResult)
    return one.errors if one.skipped is None else one.skipped
