"""`scalar()`: records one number of the step beside the tensors. By default it neither raises nor waits."""

from __future__ import annotations

from typing import Any, Optional

from capd_client.process.dynamo import traced_as, untraced
from capd_client.scalars import eager
from capd_client.scalars.traced import scalar_in_graph

__all__ = ["scalar"]


@traced_as(scalar_in_graph)
@untraced
def scalar(
    name: str, value: Any, *, iteration: Optional[int] = None, micro_batch: Optional[int] = None
) -> None:
    """Record one number of the current step, such as its loss or its learning rate, in every step.

    Neither the selected steps nor sampling, collection quotas and byte budgets matter here. The call never waits, for
    room or for a device. Without room, the scalar is dropped and counted.

    After an optimizer step, a scalar still belongs to the iteration that the step ended. If no watched model begins the
    iterations, the second scalar of a name after an optimizer step begins the next one, if it comes from the thread of
    that step. So a loop without a watched model that records a name only in some steps must pass `iteration`.

    Args:
        name: The name of the scalar, as in "loss".
        value: A real number of Python or NumPy, or a tensor of one element on any device. It is kept as a float64:
            integers beyond 2^53 are rounded, a bool is 0 or 1, and NaN and infinities stay what they are.
        iteration: Replaces the current iteration for this scalar.
        micro_batch: Replaces the current micro-batch.

    Raises:
        ConfigError: The name or an index is unusable. Only with CAPD_STRICT=1; otherwise the call counts as a drop.
    """
    eager.scalar(name, value, iteration=iteration, micro_batch=micro_batch)
