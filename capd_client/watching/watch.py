"""`watch(model)`: puts taps on the matrix products of a model.

Nothing here raises into the job without CAPD_STRICT=1. The logger reports an unusable argument once, and the default
replaces it. With capture off, `watch` returns at once and touches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Optional, Union

from torch import nn

from capd_client.config.watch_arguments import Select
from capd_client.emulation.from_settings import emulate_from_settings
from capd_client.session.current import session
from capd_client.watching.attach import WatchHandle, attached
from capd_client.watching.automatic import give_way

__all__ = ["watch"]


def watch(
    model: Union[nn.Module, Sequence[nn.Module]],
    *,
    name: Optional[str] = None,
    steps: Optional[str] = None,
    tensors: Optional[Iterable[str]] = None,
    select: Optional[Select] = None,
    slices: Union[str, Mapping[str, str], None] = None,
) -> WatchHandle:
    """Capture the tensors of the matrix products of `model`.

    For a Linear, these are X, W (once per step), Y and dY. For attention, they are query, key, value, the output and
    its gradient. Only training forwards are captured, never recomputes.

    Call `watch` on the model that the training loop calls. The model may be wrapped, sharded or parallelised before or
    after the call. Under CAPD_EMULATE, the model computes in the emulated number format from now on. Removing the
    handle does not change this (`capd_client.emulate`).

    Args:
        model: A model whose forwards begin the micro-batches. Or several models: the chunks of a virtual pipeline, as
            Megatron's `get_model` returns them.
        name: The prefix of the module names. It distinguishes several watched models.
        steps: The iterations to capture, as in "0-2,100-:100" or "all". Default: CAPD_STEPS, else [when] steps in
            capd.toml, else "0".
        tensors: Any of "input", "weight", "query", "key", "value", "output", "grad_output" (the default). The prefix
            "grad_" selects the gradients that the backward computes: "grad_input", "grad_weight", "grad_query", ...
        select: The modules and tensors to capture. It replaces CAPD_SELECT and the [[rule]]s in capd.toml. It is a
            glob, or several, over qualified module names without wrappers ("*.mlp.*"). Or it is a rule, or several, as
            mappings with the fields of [[rule]] (docs/configuration.md). Or it is the path of a .toml file of
            [[rule]]s. The other arguments fill fields that a rule leaves out.
        slices: The rows to record, as in "first:64", "stride:8" or "tokens:0-127" (`capd_client.rules.slices`). One
            slice applies to all tensors but the weight and its gradient. A mapping has a slice per tensor name, as in
            {"input": "first:64", "weight": "stride:8"}. Default: CAPD_SLICE, else slice in capd.toml, else whole
            tensors.

    Returns:
        A handle with `remove()`. It is inert if capture is off or if nothing could be attached.

    Raises:
        ConfigError: Only with CAPD_STRICT=1: an unknown tensor name, an unreadable range or slice, or a selection that
            matches nothing. Otherwise each of these is one warning.
    """
    give_way()
    sink = session()
    if sink is None:
        return WatchHandle()
    emulate_from_settings(model, sink.config)
    return attached(
        sink, model, "watch", name=name, steps=steps, tensors=tensors, select=select, slices=slices
    )
