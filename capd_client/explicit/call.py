"""`capture()`: one tensor that the job itself hands over. It neither raises nor waits by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import torch

from capd_client.errors import ConfigError
from capd_client.explicit import in_graph
from capd_client.explicit.keys import KEYS, key_of, metadata_text, moment_of
from capd_client.process.dynamo import traced_as, untraced
from capd_client.protocol.counter_page import DropReason
from capd_client.rules.slices import parse_slice
from capd_client.session import current as process
from capd_client.steps.checkpointing import repeating
from capd_client.steps.collection import within_quota
from capd_client.steps.trial_runs import trying

__all__ = ["capture"]

_graph_task = torch._C._current_graph_task_id  # -1 outside of a backward; see recompute


@traced_as(in_graph.capture_in_graph)
@untraced
def capture(
    tensor: torch.Tensor,
    *,
    tensor_name: str,
    layer_type: str = "",
    component: str = "",
    operation: str = "forward",
    phase: str = "pre",
    layer: Optional[int] = None,
    module: str = "",
    stack: str = "",
    quant_type: Optional[str] = None,
    metadata: Optional[Mapping[str, Any]] = None,
    slice: Optional[str] = None,  # noqa: A002 - the word that users look for
    iteration: Optional[int] = None,
    micro_batch: Optional[int] = None,
    sample_idx: Optional[int] = None,
    batch_idx: Optional[int] = None,
    sequence_idx: Optional[int] = None,
    immutable: bool = False,
) -> None:
    """Capture one tensor as it is now; taken whatever steps `watch` selects.

    CAPD_MODE=sample:1/N leaves calls out, CAPD_COLLECT the micro-batches after those that are collected.
    The names say what the tensor is and make its series (capd_client.protocol.key.Key). `quant_type` is a label,
    default CAPD_QUANT_TYPE, else the tensor's dtype. metadata: a small JSON object (4096 bytes). slice: the rows to
    record, as in "first:64" (capd_client.rules.slices). `iteration` to `sequence_idx` override the current moment for
    this capture.
    immutable: nothing writes to the tensor's memory, nor frees it, before `flush()`; on a GPU it is then held and
    copied from where it is, without a snapshot on the device. When there is no room the capture is dropped and
    counted, or waits up to CAPD_MAX_BLOCK_MS under CAPD_POLICY=block; nothing is ever raised.
    """
    current = process.session()
    if current is None:
        return
    in_backward = _graph_task() != -1
    if in_backward and repeating():
        return  # what activation checkpointing runs again was captured the first time
    if trying():
        return
    try:
        offered: object = tensor  # whatever the job passes
        if not isinstance(offered, torch.Tensor):
            problem = f"a {type(tensor).__name__} is not a torch tensor"
            current.drop_invalid(problem, DropReason.UNSUPPORTED)
            return
        context = current.context
        rank = context.bind()
        names = (
            tensor_name, layer_type, component, operation, phase, layer, module, stack, quant_type, tensor.dtype, rank
        )  # fmt: skip
        key = KEYS.get(names) or key_of(names, current.quant_type)
        if iteration is micro_batch is sample_idx is batch_idx is sequence_idx is None:
            # A backward belongs to the iteration of its forward, also where an optimizer steps in it.
            if context.dirty and not in_backward:
                context.begin_if_dirty()
            call = context.next_call(id(key), context.iteration, context.micro_batch)
            moment = context.moment(call=call)
        else:
            moment = moment_of(context, key, (iteration, micro_batch, sample_idx, batch_idx, sequence_idx))
        text = "" if metadata is None else metadata_text(metadata)
        take = None if slice is None else parse_slice(slice)
        if current.config.collect is not None and not within_quota(current.config, context, moment):
            return
    except (ConfigError, TypeError) as error:  # TypeError: a name that cannot be hashed
        current.drop_invalid(str(error))
        if current.config.strict:
            raise
    except Exception as error:
        current.drop_internal("capture()", error)
    else:
        current.offer(tensor, key, moment, metadata=text, take=take, immutable=immutable)


in_graph.bind(capture)
