"""Where the predecessor's calls take rank and sample from, and the state that they can be given by hand.

Order of the rank: argument, manual state, torch.distributed, LOCAL_RANK/RANK (`capd_client.ranks`), the tensor's
device, 0 with one warning. Order of the sample: argument, manual state, CURRENT_SAMPLE_IDX, 0. The environment is read
whenever it is needed; a value in it that is no number is said once, and the next source counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Optional

import torch

from capd_client.context import as_index
from capd_client.errors import ConfigError
from capd_client.key import MAX_INDEX
from capd_client.notices import Notices
from capd_client.ranks import find_rank, index_in

__all__ = ["STATE", "TensorCollectionState", "get_rank_from_tensor_device", "rank_of", "sample_of"]

_notices = Notices()
_FIELDS = {
    "_iteration": "iteration",
    "current_sample_idx": "sample_idx",
    "batch_idx": "batch_idx",
    "sequence_idx": "sequence_idx",
}  # of the moment, by the attribute that sets it
_MAX_SAID = 1000
_said: set[tuple[str, str]] = set()  # what was warned of, for good: variable, its value


class TensorCollectionState:
    """Manual state of a process: what is set here stays until it is set again; None hands it back.

    current_rank, current_sample_idx: None until they are set. current_iteration, batch_idx, sequence_idx: 0 until they
    are set; the iterations that are recorded are counted by capd until then. on_change: told the name of the moment's
    field that was set.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[str], None] = lambda _: None
        self.current_rank: Any = None
        self.current_sample_idx: Any = None
        self._iteration: Any = None
        self.batch_idx: Any = 0
        self.sequence_idx: Any = 0
        self._set: set[str] = set()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in _FIELDS and hasattr(self, "_set"):
            self._set.add(_FIELDS[name])
            self.on_change(_FIELDS[name])

    @property
    def manual(self) -> dict[str, int]:
        """What was set of the moment, by its field; what is no index is left out."""
        values = {
            "iteration": self._iteration,
            "sample_idx": self.current_sample_idx,
            "batch_idx": self.batch_idx,
            "sequence_idx": self.sequence_idx,
        }
        found = {name: _usable(name, value) for name, value in values.items()}
        return {name: index for name, index in found.items() if index is not None and name in self._set}

    @property
    def current_iteration(self) -> Any:
        """What was set, else TENSOR_SAVER_ITERATION, else 0."""
        if self._iteration is not None:
            return self._iteration
        return _from_environment("TENSOR_SAVER_ITERATION") or 0

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
        """Manual, torch.distributed, or the environment's; None where none of them knows."""
        rank, _ = _rank_of_process(self)
        return rank

    def get_sample_idx(self) -> Optional[int]:
        """Manual, or CURRENT_SAMPLE_IDX; None where neither is there."""
        manual = _usable("current_sample_idx", self.current_sample_idx)
        return _from_environment("CURRENT_SAMPLE_IDX") if manual is None else manual

    def get_iteration(self) -> int:
        """`current_iteration`."""
        return _usable("current_iteration", self.current_iteration) or 0

    def get_batch_idx(self) -> int:
        """`batch_idx`."""
        return _usable("batch_idx", self.batch_idx) or 0

    def get_sequence_idx(self) -> int:
        """`sequence_idx`."""
        return _usable("sequence_idx", self.sequence_idx) or 0


STATE = TensorCollectionState()
"""The state of this process."""


def rank_of(tensor: Any, given: Any = None) -> tuple[int, str]:
    """The rank that a tensor is recorded under, and its source."""
    rank = _usable("rank", given)
    if rank is not None:
        return rank, "argument"
    rank, source = _rank_of_process(STATE)
    if rank is not None:
        return rank, source
    rank = get_rank_from_tensor_device(tensor)
    if rank is not None:
        return rank, "device"
    if ("rank", "") not in _said:
        _said.add(("rank", ""))
        _notices.warn(
            "rank",
            "neither the call, set_global_rank, torch.distributed, LOCAL_RANK, RANK nor the tensor's device tells "
            "the rank; it is recorded as 0",
        )
    return 0, "default"


def sample_of(given: Any = None, otherwise: Optional[int] = None) -> int:
    """The sample that a tensor is recorded with. otherwise: where none of the sources is there, instead of 0."""
    sample = _usable("sample_idx", given)
    if sample is None:
        sample = STATE.get_sample_idx()
    return (otherwise or 0) if sample is None else sample


def get_rank_from_tensor_device(tensor: torch.Tensor) -> Optional[int]:
    """The number of the GPU that holds the tensor; None for any other tensor."""
    device = getattr(tensor, "device", None)
    index = getattr(device, "index", None)
    return (
        index if getattr(device, "type", "cpu") != "cpu" and isinstance(index, int) and index >= 0 else None
    )


def _rank_of_process(state: TensorCollectionState) -> tuple[Optional[int], str]:
    manual = _usable("current_rank", state.current_rank)
    if manual is not None:
        return manual, "manual"
    found = find_rank()
    if found.source != "torch.distributed":
        for variable in ("RANK", "LOCAL_RANK"):
            _from_environment(variable)  # to say what cannot be read
    return (None, "") if found.source == "default" else (found.rank, found.source)


def _from_environment(variable: str) -> Optional[int]:
    index = index_in(os.environ, variable, MAX_INDEX)
    text = os.environ.get(variable, "")
    if index is None and text:
        _say_once(variable, text, f"{variable}={text!r:.80} is not a number; the next source counts")
    return index


def _usable(name: str, value: Any) -> Optional[int]:
    """A value that somebody gave as an index; None, said once, for one that is none."""
    if value is None:
        return None
    try:
        return as_index(name, value)
    except ConfigError as error:  # its words, as showing a tensor would wait for its device
        _say_once(name, str(error)[:160], f"{error}; the next source counts")
    except Exception as error:  # of a value that cannot be asked, or shown
        _say_once(
            name,
            type(value).__name__,
            f"{name} cannot be read: {type(error).__name__}; the next source counts",
        )
    return None


def _say_once(name: str, value: str, problem: str) -> None:
    if (name, value) not in _said and len(_said) < _MAX_SAID:
        _said.add((name, value))
        _notices.warn(f"{name} {value}", "%s", problem)
