"""A static tap: a fixed buffer that a CUDA graph fills, and a capture of it after each replay.

    tap = capd_client.static_tap(y, tensor_name="y")     # before the graph is captured
    with torch.cuda.graph(graph):
        y = model(x)
        tap.copy(y)                                       # a copy on the device, part of the graph
    for batch in batches:
        x.copy_(batch)
        graph.replay()
        tap.after_replay()                                # on the stream of the replay

Replays run no Python, so an ordinary capture inside the graph would happen once, at the wrong time. It is skipped and
counted (`stream_capture`). With capture off, a tap holds no memory and does nothing. No call raises, except for an
unknown argument name, which raises even with capture off.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch

from capd_client.explicit.call import capture
from capd_client.process.dynamo import untraced
from capd_client.protocol.counter_page import DropReason
from capd_client.session.current import session
from capd_client.session.starting import AnySession
from capd_client.steps.context import MOMENT_FIELDS
from capd_client.tensors.inspect import local_part, problem_of, without_modes

__all__ = ["StaticTap", "static_tap"]


class StaticTap:
    """A buffer and the names under which it is captured. `static_tap` creates it."""

    def __init__(self, buffer: Optional[torch.Tensor], names: dict[str, Any]) -> None:
        self._buffer = buffer
        self._names = names
        self._filled = False

    @untraced
    def copy(self, tensor: torch.Tensor) -> None:
        """Copy `tensor` into the buffer on the current stream. Call it while the graph is captured.

        Args:
            tensor: A tensor of the buffer's shape, dtype and device. Any other tensor is counted and not copied.
        """
        buffer, current = self._buffer, session()
        if buffer is None or current is None:
            return
        try:
            self._copy(buffer, local_part(tensor), current)
        except Exception as error:
            current.drop_internal("StaticTap.copy", error)

    def _copy(self, buffer: torch.Tensor, tensor: torch.Tensor, current: AnySession) -> None:
        ours, theirs = (
            (tuple(t.shape), t.dtype, t.device) if isinstance(t, torch.Tensor) else type(t).__name__
            for t in (buffer, tensor)
        )
        problem = f"a static tap of {ours} was given {theirs}" if ours != theirs else problem_of(tensor)
        if problem:
            current.drop_invalid(problem, DropReason.UNSUPPORTED)
            return
        with without_modes(), torch.no_grad():
            buffer.copy_(tensor)
        self._filled = True

    @untraced
    def after_replay(
        self,
        *,
        iteration: Optional[int] = None,
        micro_batch: Optional[int] = None,
        sample_idx: Optional[int] = None,
        batch_idx: Optional[int] = None,
        sequence_idx: Optional[int] = None,
    ) -> None:
        """Capture the buffer on the current stream, after a replay has filled it. The arguments are as in `capture`."""
        if self._buffer is None or not self._filled:
            return
        capture(
            self._buffer, iteration=iteration, micro_batch=micro_batch, sample_idx=sample_idx, batch_idx=batch_idx,
            sequence_idx=sequence_idx, **self._names,
        )  # fmt: skip


@untraced
def static_tap(
    like: Union[torch.Tensor, Sequence[int]],
    *,
    dtype: Optional[torch.dtype] = None,
    device: Union[torch.device, str, None] = None,
    **names: Any,
) -> StaticTap:
    """Return a tap for a tensor inside a CUDA graph. Call it before the graph is captured.

    Args:
        like: A tensor of the shape, dtype and device to capture, or a shape.
        dtype: The dtype, if `like` is a shape. Default: torch's default dtype.
        device: The device, if `like` is a shape. Default: torch's default device.
        names: tensor_name, layer_type, component, operation, phase, layer, module, stack, quant_type, metadata,
            attributes and slice, as in `capture`.

    Returns:
        A tap. Its buffer takes as much device memory as the tensor. If the buffer cannot be created, the failure is
        counted and the tap does nothing.
    """
    # This raises for a name that is not one of these.
    inspect.signature(capture).bind(like, immutable=False, **dict.fromkeys(MOMENT_FIELDS), **names)
    current = session()
    if current is None:
        return StaticTap(None, {})
    buffer = None
    try:
        buffer = _buffer(like, dtype, device, current)
    except Exception as error:
        current.drop_invalid(f"no static tap for {names['tensor_name']}: {error}", DropReason.UNSUPPORTED)
    return StaticTap(buffer, names)


def _buffer(
    like: Union[torch.Tensor, Sequence[int]],
    dtype: Optional[torch.dtype],
    device: Union[torch.device, str, None],
    current: AnySession,
) -> Optional[torch.Tensor]:
    from capd_client.device.cuda.runtime import is_capturing

    at = like.device if isinstance(like, torch.Tensor) else torch.device(device or "cpu")
    if torch.cuda.is_initialized() and is_capturing(at if at.type == "cuda" else None):  # type: ignore[no-untyped-call]  # torch's own lack
        problem = "a static tap needs a buffer outside of the graph's memory; create it before the graph is captured"
        current.drop_invalid(problem, DropReason.STREAM_CAPTURE)
        return None
    with without_modes(), torch.inference_mode(False):
        if isinstance(like, torch.Tensor):
            tensor: torch.Tensor = local_part(like)
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return torch.zeros(tuple(like), dtype=dtype, device=device)
