"""Tables that are made once for each device, and kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch

__all__ = ["kept"]

Make = TypeVar("Make", bound=Callable[..., Any])


def kept(make: Make) -> Make:
    """`make` keeps what it gives, by its arguments. Not under FakeTensorMode: those tensors hold no values, and would
    stand in the way of all real ones that come later. A compiler looks through the keeping, with a warning."""
    found = lru_cache(maxsize=64)(make)

    @wraps(make)
    def table(*key: Any) -> Any:
        fake = torch._C._TorchDispatchModeKey.FAKE
        if torch.compiler.is_compiling() or torch._C._get_dispatch_mode(fake) is not None:
            return make(*key)
        return found(*key)

    return table  # type: ignore[return-value]
