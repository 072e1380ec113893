"""The sink of taps: the part of the session that taps use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional, Protocol

import torch
from torch import Tensor

from capd_client.config.settings import ClientConfig
from capd_client.protocol.key import Key, Moment
from capd_client.rules.slices import Slice
from capd_client.steps.context import Context
from capd_client.steps.steering import Watches

__all__ = ["Sink"]


class Sink(Protocol):
    """The receiver of captures: `capd_client.session.session.Session`, or a list in tests."""

    @property
    def config(self) -> ClientConfig: ...
    @property
    def context(self) -> Context: ...
    @property
    def steering(self) -> Watches: ...
    def offer(
        self,
        tensor: Tensor,
        key: Key,
        moment: Moment,
        *,
        cast_to: Optional[torch.dtype] = None,
        attributes: Optional[dict[str, Any]] = None,
        metadata: str = "",
        take: Optional[Slice] = None,
        store: Optional[str] = None,
    ) -> None: ...
    def keeps(self, moment: Moment) -> bool: ...
    def quant_type(self, dtype: torch.dtype) -> str: ...
    def prepare(self, devices: Iterable[torch.device]) -> None: ...
    def drop_internal(self, where: str, error: Exception) -> None: ...
