"""The records of the store's benchmarks: bfloat16 bits as uint16, synthetic or from the corpus."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bits", "corpus_records", "save_records", "synthetic_records"]

Bits = NDArray[np.uint16]


def synthetic_records(count: int, shape: tuple[int, int], seed: int = 0) -> Bits:
    """Return [count, rows, columns] of N(0, 1) times a log-normal scale per column, as bfloat16 bits."""
    rng = np.random.default_rng(seed)
    scale = rng.lognormal(0.0, 1.0, shape[1]).astype(np.float32)
    records = np.empty((count, *shape), dtype=np.uint16)
    for record in records:
        values = rng.standard_normal(shape, dtype=np.float32) * scale
        record[...] = (values.view(np.uint32) + 0x8000 >> 16).astype(np.uint16)
    return records


def corpus_records(count: int, shape: tuple[int, int], directory: Path | None, *, quick: bool) -> Bits:
    """Return [count, rows, columns] of the corpus' bfloat16 activations and gradients. Too few are repeated."""
    from benchmarks.kit.corpus import ensure

    entries = ensure(directory, quick=quick)
    kept = [e for e in entries if e.dtype == "bfloat16" and e.role in ("activation", "gradient")]
    flat = np.concatenate([entry.bits().ravel() for entry in kept])
    return np.resize(flat, (count, *shape)).astype(np.uint16, copy=False)


def save_records(
    directory: Path, count: int, shape: tuple[int, int], corpus: Path | None, *, quick: bool
) -> dict[str, Path]:
    """Write both kinds of records as .npy into `directory`. Returns their paths by kind."""
    kinds = {
        "synthetic": synthetic_records(count, shape),
        "corpus": corpus_records(count, shape, corpus, quick=quick),
    }
    paths = {kind: directory / f"{kind}.npy" for kind in kinds}
    for kind, records in kinds.items():
        np.save(paths[kind], records)
    return paths
