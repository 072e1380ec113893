"""capd as an engine of the store's benchmarks: the daemon's real pipeline, fed as ranks' sessions feed it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capd.server.heap import settle_heap
from capd.server.pipeline.jobs import RecordJob
from capd.server.pipeline.pipeline import Pipeline
from capd.store.run.options import StoreOptions
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define, Descriptor

__all__ = ["CapdWriter", "definition"]

CLIENT = b"benchmark-client"
STAGING_NBYTES = 256 << 20
CLOSE_TIMEOUT_S = 600.0
ROLES = ("MainThread", "capd-dispatch", "capd-encode", "capd-append")


class NoLimit:
    """A disk budget that never refuses."""

    def refusal(self, nbytes: int, *, new_series: bool = False) -> str | None:
        return None


class Outcomes:
    """A sink that counts, as a session's sink does."""

    def __init__(self) -> None:
        self.count = 0
        self.refusals: list[str] = []

    def committed(self, sequences: Sequence[int]) -> None:
        self.count += len(sequences)

    def refused(self, sequence: int, reason: DropReason, message: str) -> None:
        self.refusals.append(f"{reason}: {message}")


def definition(number: int, dtype: str = "bfloat16") -> Define:
    """Return key number `number` of a model with eight tapped tensors per layer."""
    layer, place = divmod(number, 8)
    key = Key(
        quant_type="bf16", rank=0, layer=layer, layer_type="linear", component="linear",
        tensor_name=("input", "output")[place % 2], module=f"layers.{layer}.linear{place // 2}", stack="layers",
    )  # fmt: skip
    return Define(id=number, key=key, dtype=dtype)


class CapdWriter:
    """A pipeline on `root` with the one run "run". The options are those of StoreOptions."""

    def __init__(self, root: Path, *, threads: int, **options: Any) -> None:
        settle_heap()
        self.run = root / "run.zarr"
        self._outcomes = Outcomes()
        self._sequence = 0
        self._pipeline = Pipeline(
            root,
            "n0",
            StoreOptions(**options),
            threads=threads,
            staging_nbytes=STAGING_NBYTES,
            budget=NoLimit(),
        )
        self._pipeline.open_run("run")

    def put(self, define: Define, data: memoryview, shape: tuple[int, ...], iteration: int = 0) -> None:
        """Submit one record. `data` holds its bytes and does not change until the record is committed."""
        self._sequence += 1
        descriptor = Descriptor(self._sequence, 0, data.nbytes, define.id, shape, Moment(iteration=iteration))
        self._pipeline.submit(
            RecordJob("run", CLIENT, self._sequence, define, descriptor, data, self._outcomes)
        )

    def flush(self) -> None:
        """Wait until everything is committed."""
        self._pipeline.flush().result()
        if self._outcomes.refusals:
            raise RuntimeError(
                f"{len(self._outcomes.refusals)} records refused: {self._outcomes.refusals[0]}"
            )

    def seal(self) -> None:
        """Wait until plain Zarr readers see everything."""
        self._pipeline.seal("run").result()

    def close(self) -> None:
        """Seal, close, and end the threads."""
        self.flush()
        if not self._pipeline.close(CLOSE_TIMEOUT_S):
            raise RuntimeError("the pipeline did not close in time")

    def stored_nbytes(self) -> int:
        """Return the bytes of the run's sealed shards."""
        return sum(path.stat().st_size for path in self.run.glob("**/data/c/**/*") if path.is_file())

    @staticmethod
    def thread_cpu_s() -> dict[str, float]:
        """Return the CPU seconds so far of the pipeline's threads and the submitting thread, by role."""
        spent = dict.fromkeys(ROLES, 0.0)
        for thread in threading.enumerate():
            role = next((role for role in ROLES if thread.name.startswith(role)), None)
            if role is not None:
                line = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
                spent[role] += int(line.split()[0]) / 1e9
        return spent
