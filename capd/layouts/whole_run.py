"""One run of a comparison: its whole tensors by name, and when each was captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capd.errors import ConfigError, NothingMatched
from capd.store.logical.layout import coordinates_of
from capd.store.logical.series import LogicalSeries
from capd.store.read.store import Store
from capd_client.protocol.key import Moment

__all__ = ["Occasion", "TensorName", "WholeRun"]

Coordinates = tuple[tuple[str, int], ...]
# Dimensions that explain a factor, as attributes name them.
_SIZES = ("tp", "cp", "dp", "ep", "pp", "etp", "edp")


class TensorName(NamedTuple):
    """A whole tensor of a run: module, operation and tensor."""

    module: str
    operation: str
    tensor: str

    def __str__(self) -> str:
        return f"{self.module or 'tensor'}.{self.operation}.{self.tensor}"

    @property
    def is_parameter(self) -> bool:
        """Whether it is a weight or a bias, which no sample changes."""
        return self.tensor in ("weight", "bias") or self.tensor.startswith("weight.")

    @property
    def is_of_parameter(self) -> bool:
        """Whether it has the shape of a parameter: a parameter, or the gradient of one."""
        return self.is_parameter or self.tensor in ("grad_weight", "grad_bias", "main_grad")

    @property
    def is_of_step(self) -> bool:
        """Whether it is of a whole step, whatever the micro-batch: a parameter, or the gradient after all of them."""
        return self.is_parameter or self.tensor == "main_grad"

    @property
    def is_of_expert(self) -> bool:
        """Whether it belongs to one expert of several: its rows depend on the routing."""
        return ".experts." in f".{self.module}"


class Occasion(NamedTuple):
    """When a whole tensor was captured: iteration, micro-batch, call, and the coordinates that tell samples apart."""

    iteration: int
    micro_batch: int
    call: int
    coordinates: Coordinates = ()


class WholeRun:
    """The whole tensors of one run."""

    def __init__(
        self, store: Store, tests: Iterable[Callable[[Any], bool]] = (), attempt: int | str = "latest"
    ) -> None:
        """Group the series of a run.

        Args:
            store: The run.
            tests: Conditions on the key of a tensor.
            attempt: As in `Store.find`.

        Raises:
            ContradictoryParts: The attributes of a series are not what docs/logical.md says.
            ConfigError: Two tensors share their name and coordinates.
            NothingMatched: No tensor is selected.
        """
        self.source = str(store.path)
        tests = list(tests)
        self._held: dict[TensorName, dict[Occasion, tuple[LogicalSeries, Moment]]] = {}
        for one in store.logical(attempt=attempt):
            if one.kept == "tensor" and all(test(one.key) for test in tests):
                self._add(one)
        if not self._held:
            raise NothingMatched(f"no whole tensor of {self.source} matches the selection")

    def _add(self, one: LogicalSeries) -> None:
        key = one.key
        name = TensorName(key.module or key.layer_type, key.operation, key.tensor_name)
        occasions = self._held.setdefault(name, {})
        for moment in one.moments:
            if moment.recompute:
                continue
            at = Occasion(
                moment.iteration or 0,
                -1 if moment.micro_batch is None else moment.micro_batch,
                moment.call or 0,
                tuple(sorted(one.coordinates.items())),
            )
            known = occasions.setdefault(at, (one, moment))
            if known[0] is not one:
                raise ConfigError(
                    f"{self.source}: two tensors are {name} at iteration {at.iteration} "
                    f"({known[0].key.quant_type} {known[0].dtype} and {key.quant_type} {one.dtype}); "
                    "select one of them with --quant-type, --phase or --stack"
                )

    @property
    def names(self) -> Sequence[TensorName]:
        """The tensors, in order of their names in the run."""
        return list(self._held)

    def __contains__(self, name: TensorName) -> bool:
        """Whether the run has a tensor at any time."""
        return name in self._held

    @cached_property
    def modules(self) -> frozenset[str]:
        """The modules that have tensors."""
        return frozenset(name.module for name in self._held)

    def occasions(self, name: TensorName) -> Sequence[Occasion]:
        """When a tensor was captured; empty if the run does not have it."""
        return list(self._held.get(name, ()))

    def has(self, name: TensorName, at: Occasion) -> bool:
        """Whether a tensor was captured then."""
        return at in self._held.get(name, {})

    def series(self, name: TensorName, at: Occasion) -> LogicalSeries:
        """The logical series that has a tensor of an occasion."""
        return self._held[name][at][0]

    def time(self, name: TensorName, at: Occasion) -> int:
        """The time at which its first part was captured, in nanoseconds: the order of execution."""
        return self._held[name][at][1].time_ns

    def values(self, name: TensorName, at: Occasion) -> NDArray[np.generic]:
        """The numbers of a whole tensor. Raises as `LogicalSeries.numpy`."""
        series, moment = self._held[name][at]
        return series.values(moment)

    def shape(self, name: TensorName, at: Occasion) -> tuple[int, ...]:
        """The shape of a whole tensor. Raises as `LogicalSeries.shape`."""
        series, moment = self._held[name][at]
        return series.shape(moment)

    def spread(self, name: TensorName, at: Occasion) -> float:
        """The largest relative difference between its replicas. Raises as `LogicalSeries.numpy`."""
        series, moment = self._held[name][at]
        return series.spread_at(moment)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of the layout, such as {"tp_size": 2}, and `micro_batches` of one rank in one iteration."""
        found: dict[str, int] = {}
        for occasions in self._held.values():
            for series, _ in occasions.values():
                for part in series.series:
                    for dimension, (_, size) in coordinates_of(part.attributes).items():
                        if dimension in _SIZES:
                            name = f"{dimension}_size"
                            found[name] = max(size, found.get(name, 1))
                break
        return {**found, "micro_batches": self.micro_batches}

    @property
    def summing_ranks(self) -> int:
        """The ranks over which the terms of one product are added up."""
        sizes = self.sizes
        return max(sizes.get("tp_size", 1), sizes.get("etp_size", 1)) * sizes.get("cp_size", 1)

    @cached_property
    def micro_batches(self) -> int:
        """The most micro-batches of one iteration that a rank captured."""
        most = 1
        for name, occasions in self._held.items():
            if not name.is_of_step:
                seen: dict[tuple[int, Coordinates], set[int]] = {}
                for at in occasions:
                    seen.setdefault((at.iteration, at.coordinates), set()).add(at.micro_batch)
                most = max(most, *map(len, seen.values()))
        return most

    @cached_property
    def perturb(self) -> str | None:
        """The perturbation of the job (CAPD_PERTURB), None without."""
        told = (
            part.attributes.get("perturb")
            for occasions in self._held.values()
            for series in {id(one): one for one, _ in occasions.values()}.values()
            for part in series.series
        )
        return next((text for text in told if isinstance(text, str)), None)

    @cached_property
    def dropout(self) -> float:
        """The largest probability of dropout that the job told, 0.0 without."""
        told = [
            part.attributes.get("dropout", 0.0)
            for occasions in self._held.values()
            for series in {id(one): one for one, _ in occasions.values()}.values()
            for part in series.series
        ]
        return max((float(p) for p in told if isinstance(p, (int, float))), default=0.0)
