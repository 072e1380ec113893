"""`capture()`: captures one tensor that the job passes. By default it neither raises nor waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import torch

from capd_client.errors import ConfigError
from capd_client.explicit import in_graph
from capd_client.explicit.keys import KEYS, attributes_of, key_of, metadata_text, moment_of
from capd_client.process.dynamo import traced_as, untraced
from capd_client.protocol.counter_page import DropReason
from capd_client.rules.slices import parse_slice
from capd_client.session import current as process
from capd_client.steps.checkpointing import repeating
from capd_client.steps.collection import within_quota
from capd_client.steps.trial_runs import trying

__all__ = ["capture"]

# -1 outside of a backward; see `capd_client.steps.checkpointing`.
_graph_task = torch._C._current_graph_task_id


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
    attributes: Optional[Mapping[str, Any]] = None,
    slice: Optional[str] = None,  # noqa: A002 - the word that users look for
    iteration: Optional[int] = None,
    micro_batch: Optional[int] = None,
    sample_idx: Optional[int] = None,
    batch_idx: Optional[int] = None,
    sequence_idx: Optional[int] = None,
    immutable: bool = False,
) -> None:
    """Capture one tensor as it is now, in any step.

    The steps that `watch` selects do not matter here. CAPD_MODE=sample:1/N skips calls. CAPD_COLLECT skips
    micro-batches after its quota.

    If there is no room, the capture is dropped and counted. Under CAPD_POLICY=block it first waits up to
    CAPD_MAX_BLOCK_MS.

    Args:
        tensor: The tensor. It may change after the call.
        tensor_name: The name of the tensor, as in "query". All names together are the key of a series of records
            (`capd_client.protocol.key.Key`).
        layer_type: The type of the layer, as in "attention".
        component: The part of the layer, as in "FA".
        operation: "forward" or "backward".
        phase: "pre" for an operand of a product, "post" for its result.
        layer: The number of the layer, 0-based.
        module: The qualified name of the module.
        stack: The name of the stack of layers, as in "encoder".
        quant_type: A label. Default: CAPD_QUANT_TYPE, else the tensor's dtype.
        metadata: A JSON object of at most 4096 bytes.
        attributes: JSON values that all captures with these names share, such as the rank's place and the placement
            of the tensor: {"tp_rank": 0, "tp_size": 2, "tp_placement": "R"} (docs/logical.md). At most 64 KiB.
        slice: The rows to record, as in "first:64" (`capd_client.rules.slices`).
        iteration: Replaces the current iteration for this capture.
        micro_batch: Replaces the current micro-batch.
        sample_idx: Replaces the current sample.
        batch_idx: Replaces the current batch.
        sequence_idx: Replaces the current sequence.
        immutable: A promise that nothing writes to the tensor's memory or frees it before `flush()`. On a GPU, the
            tensor is then copied without a snapshot on the device.

    Raises:
        ConfigError: A name, an index, the metadata, the attributes or the slice is unusable. Only with CAPD_STRICT=1;
            otherwise the call counts as a drop.
        TypeError: A name cannot be hashed. Also only with CAPD_STRICT=1.
    """
    current = process.session()
    if current is None:
        return
    in_backward = _graph_task() != -1
    # When activation checkpointing runs the call again, its first pass has captured the tensor already.
    if in_backward and repeating():
        return
    if trying():
        return
    try:
        # The job may pass anything.
        offered: object = tensor
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
            # A backward belongs to the iteration of its forward, even if an optimizer steps in it.
            if context.dirty and not in_backward:
                context.begin_if_dirty()
            call = context.calls.next(id(key), context.iteration, context.micro_batch)
            moment = context.moment(call=call)
        else:
            moment = moment_of(context, key, (iteration, micro_batch, sample_idx, batch_idx, sequence_idx))
        text = "" if metadata is None else metadata_text(metadata)
        constants = None if attributes is None else attributes_of(attributes)
        take = None if slice is None else parse_slice(slice)
        if current.config.collect is not None and not within_quota(current.config, context, moment):
            return
    # TypeError: a name that cannot be hashed.
    except (ConfigError, TypeError) as error:
        current.drop_invalid(str(error))
        if current.config.strict:
            raise
    except Exception as error:
        current.drop_internal("capture()", error)
    else:
        current.offer(
            tensor, key, moment, attributes=constants, metadata=text, take=take, immutable=immutable
        )


in_graph.bind(capture)
