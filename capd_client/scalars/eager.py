"""The call of `scalar()` outside of compiled code. Graphs run it, too, where their operator stands."""

from __future__ import annotations

from typing import Any, Optional

from capd_client.errors import ConfigError
from capd_client.process.dynamo import untraced
from capd_client.scalars.recording import record
from capd_client.session import current as process
from capd_client.steps.checkpointing import in_backward, repeating
from capd_client.steps.trial_runs import trying

__all__ = ["scalar"]


# It has the name of the public function, because Python's messages about arguments name it.
@untraced
def scalar(
    name: str, value: Any, *, iteration: Optional[int] = None, micro_batch: Optional[int] = None
) -> None:
    """Record one number now, as `capd_client.scalar` says."""
    current = process.session()
    if current is None:
        return
    # When activation checkpointing runs the call again, its first pass has recorded the scalar already.
    if trying() or (in_backward() and repeating()):
        return
    try:
        record(current, name, value, iteration, micro_batch)
    except ConfigError as error:
        current.drop_invalid(str(error))
        if current.config.strict:
            raise
    except Exception as error:
        current.drop_internal("scalar()", error)
