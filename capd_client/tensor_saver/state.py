"""tensor_saver's manual state, and the rank and sample that result from it and from the other sources.

Sources of the rank, in order: argument, manual state, torch.distributed, LOCAL_RANK/RANK
(`capd_client.process.ranks`), the tensor's device, 0 with one warning. Sources of the sample, in order: argument,
manual state, CURRENT_SAMPLE_IDX, 0. The environment is read whenever it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

from capd_client.process.dynamo import untraced, untraced_methods
from capd_client.tensor_saver.indices import (
    get_rank_from_tensor_device,
    index_of_variable,
    rank_of_process,
    say_once,
    usable,
)

__all__ = [
    "STATE", "TensorCollectionState", "get_current_rank_and_sample", "get_tensor_collection_state",
    "initialize_tensor_collection", "rank_of", "sample_of",
]  # fmt: skip

# The fields of the moment, by the attribute that sets each.
_FIELDS = {
    "_iteration": "iteration",
    "current_sample_idx": "sample_idx",
    "batch_idx": "batch_idx",
    "sequence_idx": "sequence_idx",
}


@untraced_methods
class TensorCollectionState:
    """The manual state of a process.

    A value stays until it is set again. None returns the choice to the other sources.

    Attributes:
        current_rank: None until it is set.
        current_sample_idx: None until it is set.
        current_iteration: 0 until it is set. Until then capd counts the iterations that are recorded.
        batch_idx: 0 until it is set.
        sequence_idx: 0 until it is set.
        on_change: Called with the name of the moment's field that was set.
    """

    # The values of the moment that were set and are indices, by field.
    _manual: Optional[dict[str, int]] = None

    def __init__(self) -> None:
        self.on_change: Callable[[str], None] = lambda _: None
        self.current_rank: Any = None
        self.current_sample_idx: Any = None
        self._iteration: Any = None
        self.batch_idx: Any = 0
        self.sequence_idx: Any = 0
        self._manual = {}

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        field = _FIELDS.get(name)
        if field is None or self._manual is None:
            return
        index = usable(field, value)
        if index is None:
            self._manual.pop(field, None)
        else:
            self._manual[field] = index
        self.on_change(field)

    @property
    def manual(self) -> dict[str, int]:
        """The values of the moment that were set, by field. Values that are not an index are left out."""
        return dict(self._manual or ())

    @property
    def current_iteration(self) -> Any:
        """The iteration that was set, or else TENSOR_SAVER_ITERATION, or else 0."""
        if self._iteration is not None:
            return self._iteration
        return index_of_variable("TENSOR_SAVER_ITERATION") or 0

    @current_iteration.setter
    def current_iteration(self, iteration: Any) -> None:
        self._iteration = iteration

    def set_rank(self, rank: int) -> None:
        """Record further captures under this rank."""
        self.current_rank = rank

    def set_sample_idx(self, sample_idx: int) -> None:
        """Record further captures with this sample."""
        self.current_sample_idx = sample_idx

    def set_iteration(self, iteration: int) -> None:
        """Record further captures in this iteration."""
        self.current_iteration = iteration

    def set_batch_idx(self, batch_idx: int) -> None:
        """Record further captures with this batch."""
        self.batch_idx = batch_idx

    def set_sequence_idx(self, sequence_idx: int) -> None:
        """Record further captures with this sequence."""
        self.sequence_idx = sequence_idx

    def get_rank(self) -> Optional[int]:
        """Return the rank that was set, torch.distributed's, or the environment's. None if no source knows it."""
        rank, _ = _manual_or_of_process(self)
        return rank

    def get_sample_idx(self) -> Optional[int]:
        """Return the sample that was set, or CURRENT_SAMPLE_IDX. None if neither exists."""
        manual = self.manual.get("sample_idx")
        return index_of_variable("CURRENT_SAMPLE_IDX") if manual is None else manual

    def get_iteration(self) -> int:
        """Return `current_iteration`, or 0 if it is not an index."""
        return usable("iteration", self.current_iteration) or 0

    def get_batch_idx(self) -> int:
        """Return `batch_idx`, or 0 if it is not an index."""
        return self.manual.get("batch_idx", 0)

    def get_sequence_idx(self) -> int:
        """Return `sequence_idx`, or 0 if it is not an index."""
        return self.manual.get("sequence_idx", 0)


STATE = TensorCollectionState()
"""The state of this process."""


def rank_of(tensor: Any, given: Any = None) -> tuple[int, str]:
    """Return the rank that a tensor is recorded under, and its source."""
    rank = usable("rank", given)
    if rank is not None:
        return rank, "argument"
    rank, source = _manual_or_of_process(STATE)
    if rank is not None:
        return rank, source
    rank = get_rank_from_tensor_device(tensor)
    if rank is not None:
        return rank, "device"
    say_once(
        "rank",
        "",
        "neither the call, set_global_rank, torch.distributed, LOCAL_RANK, RANK nor the tensor's device names the "
        "rank; it is recorded as 0",
    )
    return 0, "default"


def sample_of(given: Any = None, otherwise: Optional[int] = None) -> int:
    """Return the sample that a tensor is recorded with.

    `otherwise` replaces the final 0 if no source has a sample.
    """
    sample = usable("sample_idx", given)
    if sample is None:
        sample = STATE.get_sample_idx()
    return (otherwise or 0) if sample is None else sample


def _manual_or_of_process(state: TensorCollectionState) -> tuple[Optional[int], str]:
    manual = usable("current_rank", state.current_rank)
    return rank_of_process() if manual is None else (manual, "manual")


@untraced
def initialize_tensor_collection(
    rank: Optional[int] = None,
    sample_idx: Optional[int] = None,
    iteration: int = 0,
    batch_idx: int = 0,
    sequence_idx: int = 0,
) -> None:
    """Set the manual state. If rank or sample_idx is None, its value does not change."""
    if rank is not None:
        STATE.set_rank(rank)
    if sample_idx is not None:
        STATE.set_sample_idx(sample_idx)
    STATE.set_iteration(iteration)
    STATE.set_batch_idx(batch_idx)
    STATE.set_sequence_idx(sequence_idx)


def get_tensor_collection_state() -> TensorCollectionState:
    """Return the manual state of this process."""
    return STATE


@untraced
def get_current_rank_and_sample() -> tuple[Optional[int], Optional[int]]:
    """Return the rank and sample of a capture that names neither, without the tensor's device.

    The last source is 0.
    """
    return STATE.get_rank() or 0, sample_of()
