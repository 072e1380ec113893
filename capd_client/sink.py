"""What taps need of the session that they hand their captures to, and of its settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional, Protocol

import torch
from torch import Tensor

from capd_client.key import Key, Moment
from capd_client.rule_settings import RuleSettings
from capd_client.slicing import Slice
from capd_client.steering import Watches
from capd_client.stepping import Context

__all__ = ["Settings", "Sink"]


class Settings(Protocol):
    """What `watch` and its taps need of `capd_client.config.ClientConfig`."""

    @property
    def steps(self) -> str: ...
    @property
    def micro_batches(self) -> str: ...
    @property
    def ranks(self) -> str: ...
    @property
    def slice(self) -> Optional[str]: ...
    @property
    def rules(self) -> tuple[RuleSettings, ...]: ...
    @property
    def store(self) -> str: ...
    @property
    def collect(self) -> Optional[str]: ...
    @property
    def collect_dir(self) -> Optional[str]: ...
    @property
    def strict(self) -> bool: ...


class Sink(Protocol):
    """Where taps put their captures: `capd_client.api.Session`, or a list in tests."""

    @property
    def config(self) -> Settings: ...
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
