"""Writes records through the real pipeline into a store, for the store's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from capd.server.pipeline.jobs import RecordJob
from capd.server.pipeline.pipeline import Pipeline
from capd.store.format.frames import StatsRow
from capd.store.format.packed_statistics import pack
from capd.store.run.options import StoreOptions
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define, Descriptor

CLIENT = b"0123456789abcdef"


class NoLimit:
    """A disk budget that never refuses."""

    def refusal(self, nbytes: int, *, new_series: int = 0) -> str | None:
        return None


@dataclass(eq=False)
class Outcomes:
    """A sink that remembers what the pipeline said."""

    committed_sequences: list[int] = field(default_factory=list)
    refusals: list[tuple[int, DropReason, str]] = field(default_factory=list)

    def committed(self, sequences: Sequence[int]) -> None:
        self.committed_sequences += sequences

    def refused(self, sequence: int, reason: DropReason, message: str) -> None:
        self.refusals.append((sequence, reason, message))


def key(tensor_name: str = "input", **fields: object) -> Key:
    """A key with the usual defaults."""
    return Key(**{"quant_type": "bf16", "rank": 0, "layer": 0, "tensor_name": tensor_name, **fields})


def _packed(stats: StatsRow | None) -> bytes | None:
    return None if stats is None else pack(stats)


class Writer:
    """A pipeline on `root` with one run, and the records that were put into it."""

    def __init__(self, root: Path, *, run_id: str = "run", node: str = "n0", **options: object) -> None:
        self.run = root / f"{run_id}.zarr"
        self.run_id, self.node = run_id, node
        self.client = CLIENT
        self.outcomes = Outcomes()
        self.held: dict[tuple[Key, str], list[tuple[Moment, NDArray[np.generic]]]] = {}
        self.sequence = 0
        self.pipeline = Pipeline(
            root, node, StoreOptions(**options), threads=2, staging_nbytes=32 << 20, budget=NoLimit()
        )
        try:
            self.pipeline.open_run(run_id)
        except BaseException:
            self.pipeline.close(1)
            raise

    def put(self, key: Key, dtype: str, bits: NDArray[np.generic], **moment: int) -> int:
        """Submit one record of stored bits; returns its sequence."""
        self.sequence += 1
        self.resubmit(self.sequence, key, dtype, bits, **moment)
        self.held.setdefault((key, dtype), []).append((Moment(**moment), bits))
        return self.sequence

    def resubmit(
        self,
        sequence: int,
        key: Key,
        dtype: str,
        bits: NDArray[np.generic],
        stats: StatsRow | None = None,
        **moment: int,
    ) -> None:
        data = memoryview(np.ascontiguousarray(bits).tobytes())
        descriptor = Descriptor(sequence, 0, bits.nbytes, 0, bits.shape, Moment(**moment))
        define = Define(id=0, key=key, dtype=dtype)
        self.pipeline.submit(
            RecordJob(
                self.run_id, self.client, sequence, define, descriptor, data, self.outcomes, _packed(stats)
            )
        )

    def put_statistics(
        self, key: Key, dtype: str, bits: NDArray[np.generic], stats: StatsRow | None = None, **moment: int
    ) -> int:
        """Submit one record of which only statistics are kept. stats: as the rank handed them over, without bits."""
        self.sequence += 1
        data = memoryview(b"" if stats is not None else np.ascontiguousarray(bits).tobytes())
        descriptor = Descriptor(self.sequence, 0, data.nbytes, 0, bits.shape, Moment(**moment), payload=False)
        define = Define(id=0, key=key, dtype=dtype)
        self.pipeline.submit(
            RecordJob(
                self.run_id,
                self.client,
                self.sequence,
                define,
                descriptor,
                data,
                self.outcomes,
                _packed(stats),
            )
        )
        return self.sequence

    def flush(self) -> None:
        self.pipeline.flush().result(timeout=60)

    def close(self) -> None:
        assert self.pipeline.close(60)
