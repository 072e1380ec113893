"""Captures tensors from a running training job: the public names, imported lazily.

    import capd_client
    capd_client.watch(model)
    capd_client.capture(t, tensor_name="query", layer_type="attention", layer=3)
    capd_client.scalar("loss", loss)

Importing this package or `capd_client.protocol` imports no torch. The names below load their modules at first use.
Nothing here raises into the training process unless CAPD_STRICT=1 is set, but for `emulate` with a recipe that cannot
be applied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capd_client.api import capture, close, counters, flush, keep, scalar, set_moment
    from capd_client.emulation.emulation import emulate
    from capd_client.explicit.static_tap import static_tap
    from capd_client.integrations.te_inspection import te_features
    from capd_client.watching.plan import plan
    from capd_client.watching.watch import watch

__all__ = [
    "capture",
    "close",
    "counters",
    "emulate",
    "flush",
    "keep",
    "plan",
    "scalar",
    "set_moment",
    "static_tap",
    "te_features",
    "watch",
]

_HOMES = {
    "capture": "capd_client.api",
    "close": "capd_client.api",
    "counters": "capd_client.api",
    "emulate": "capd_client.emulation.emulation",
    "flush": "capd_client.api",
    "keep": "capd_client.api",
    "plan": "capd_client.watching.plan",
    "scalar": "capd_client.api",
    "set_moment": "capd_client.api",
    "static_tap": "capd_client.explicit.static_tap",
    "te_features": "capd_client.integrations.te_inspection",
    "watch": "capd_client.watching.watch",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    # The next access finds the name without this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
