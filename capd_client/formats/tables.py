"""A cache of lookup tables, which are computed once for each device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch

__all__ = ["cached"]

Make = TypeVar("Make", bound=Callable[..., Any])


def cached(make: Make) -> Make:
    """Cache the results of `make` by its arguments.

    Under FakeTensorMode nothing is cached: fake tensors hold no values, and would replace all later real ones. A
    compiler traces `make` itself, with a warning.
    """
    found = lru_cache(maxsize=64)(make)

    @wraps(make)
    def table(*key: Any) -> Any:
        fake = torch._C._TorchDispatchModeKey.FAKE
        if torch.compiler.is_compiling() or torch._C._get_dispatch_mode(fake) is not None:
            return make(*key)
        return found(*key)

    return table  # type: ignore[return-value]
