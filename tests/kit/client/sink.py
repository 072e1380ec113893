"""A sink that keeps captures in a list, with the real context underneath."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

import msgspec
import torch

from capd_client.config.settings import ClientConfig
from capd_client.process.log import RateLimitedLog
from capd_client.protocol.key import Key, Moment
from capd_client.rules.slices import Slice
from capd_client.steps.context import Context
from capd_client.steps.steering import Steering
from capd_client.tensors.inspect import unwrap
from capd_client.tensors.placements import with_placements
from capd_client.tensors.subclasses import context_of, inner_tensors


@dataclass
class Captured:
    """One offer, with the bytes as they were at that moment."""

    key: Key
    moment: Moment
    value: torch.Tensor
    requires_grad: bool
    attributes: dict[str, Any]
    metadata: str = ""
    store: Optional[str] = None

    @property
    def at(self) -> tuple[int, int, int]:
        return (self.moment.iteration, self.moment.micro_batch, self.moment.call)


@dataclass
class MemorySink:
    """Everything the hooks need of a session."""

    config: ClientConfig = field(default_factory=lambda: ClientConfig(steps="all"))
    captured: list[Captured] = field(default_factory=list)
    errors: list[tuple[str, Exception]] = field(default_factory=list)
    prepared: list[set[torch.device]] = field(default_factory=list)
    capturing: bool = True

    def __post_init__(self) -> None:
        self.steering = Steering(self._capture, RateLimitedLog())
        self.begin_at()

    def begin_at(self, *, iteration: int = 0, environ: Optional[Mapping[str, str]] = None) -> None:
        """Begin the process at another iteration, or as another rank."""
        self.context = Context(iteration=iteration, environ=environ or {}, on_iteration=self.steering.begin)

    def _capture(self, capturing: bool) -> None:
        self.capturing = capturing

    def offer(
        self,
        tensor: torch.Tensor,
        key: Key,
        moment: Moment,
        *,
        cast_to: Optional[torch.dtype] = None,
        attributes: Optional[dict[str, Any]] = None,
        metadata: str = "",
        take: Optional[Slice] = None,
        store: Optional[str] = None,
    ) -> None:
        attributes = with_placements(tensor, attributes)
        inner = list(inner_tensors(tensor))
        for name, part in inner:
            of_part = msgspec.structs.replace(key, tensor_name=key.tensor_name + name)
            self.offer(part, of_part, moment, attributes={**(attributes or {}), **context_of(tensor)})
        if inner:
            return
        plain, problem = unwrap(tensor)
        assert plain is not None, problem
        with torch.no_grad():
            value = plain.detach() if take is None else take.apply(plain, metadata)[0]
            value = value.to(dtype=cast_to or tensor.dtype, copy=True)
        self.captured.append(
            Captured(key, moment, value, tensor.requires_grad, attributes or {}, metadata, store)
        )

    def keeps(self, moment: Moment) -> bool:
        return True

    def quant_type(self, dtype: torch.dtype) -> str:
        return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float64: "fp64", torch.uint8: "uint8"}[
            dtype
        ]

    def prepare(self, devices: Iterable[torch.device]) -> None:
        self.prepared.append(set(devices))

    def drop_internal(self, where: str, error: Exception) -> None:
        self.errors.append((where, error))

    def names(self) -> Counter[str]:
        """How many captures there are of each tensor name."""
        return Counter(c.key.tensor_name for c in self.captured)

    def of(self, module: str, tensor_name: str) -> list[Captured]:
        """The captures of one module's tensor, in order."""
        return [c for c in self.captured if (c.key.module, c.key.tensor_name) == (module, tensor_name)]

    def one(self, module: str, tensor_name: str, at: tuple[int, int, int] = (0, 0, 0)) -> torch.Tensor:
        """The value captured at (iteration, micro_batch, call); fails unless there is exactly one."""
        found = [c.value for c in self.of(module, tensor_name) if c.at == at]
        assert len(found) == 1, (module, tensor_name, at, [c.at for c in self.of(module, tensor_name)])
        return found[0]
