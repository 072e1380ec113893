"""`watch(model)`: puts taps on the matrix products of a model.

Nothing here raises into the job: what cannot be used is reported once through the logger, and the default is
used instead (CAPD_STRICT=1 raises). With capture off, `watch` returns at once and touches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Optional, Union

from torch import nn

from capd_client.config.watch_arguments import Select
from capd_client.emulation.from_settings import emulate_as_told
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
    """Capture the operands of the matrix products of `model`: of a Linear X, W (once per step), Y and dY; of attention
    query, key, value, the output and its gradient.

    Call it on the model that the training loop calls, before or after wrapping, sharding or parallelising it. Only
    training forwards are captured, recomputes never. Under CAPD_EMULATE the model computes in that number format from
    now on, also once the handle is removed (`capd_client.emulate`).

    Args:
        model: its forwards begin the micro-batches. Or several: the chunks of a virtual pipeline, as Megatron's
            `get_model` returns them.
        name: put in front of the module names; tells several watched models apart.
        steps: iterations to capture, as in "0-2,100-:100" or "all". Default: CAPD_STEPS, else [when] steps
            in capd.toml, else "0".
        tensors: any of "input", "weight", "query", "key", "value", "output", "grad_output" (the default), and with
            "grad_" in front what the backward computes: "grad_input", "grad_weight", "grad_query", ...
        select: which modules and tensors, in place of CAPD_SELECT and of the [[rule]]s in capd.toml: a glob, or globs,
            over qualified module names without wrappers ("*.mlp.*"); a rule, or rules, as mappings with the fields of
            [[rule]] (docs/configuration.md); or the path of a .toml file of [[rule]]s. What a rule does not say is as
            the other arguments have it.
        slices: the rows to record, as in "first:64", "stride:8" or "tokens:0-127" (capd_client.rules.slices): one for
            all but the weight and its gradient, or by tensor name, as in {"input": "first:64", "weight":
            "stride:8"}. Default: CAPD_SLICE, else slice in capd.toml, else whole tensors.

    Returns:
        A handle with `remove()`. Inert when capture is off, and where nothing could be attached.

    Raises:
        ConfigError: only with CAPD_STRICT=1, for an unknown tensor name, an unreadable range or slice, or a
            selection that matches nothing. Otherwise these are one warning each.
    """
    give_way()
    sink = session()
    if sink is None:
        return WatchHandle()
    emulate_as_told(model, sink.config)
    return attached(
        sink, model, "watch", name=name, steps=steps, tensors=tensors, select=select, slices=slices
    )
