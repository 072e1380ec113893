"""Runs whose daemon measured errors of formats while it captured, written without a daemon."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from capd.analyze.format_choice import choices
from capd.lab.measuring import measured_bits
from capd.lab.stored_errors import StoredErrors, pack_row
from capd.server.lab.copies import RecordCopy
from capd.server.lab.error_writer import ErrorWriter
from capd.server.lab.outcomes import LabFigures
from capd.store.read.store import Store
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define
from tests.kit.store.cli import linear_key
from tests.kit.store.writing import NoLimit, Writer

__all__ = ["FORMATS", "MeasuredWriter", "errors_in", "measured_run"]

FORMATS = "fp8,mxfp8"


class MeasuredWriter(Writer):
    """A pipeline on `root` with one run, and what a lab would write into it."""

    def __init__(self, root: Path, *, budget: NoLimit | None = None, **options: object) -> None:
        super().__init__(root, **options)  # type: ignore[arg-type]
        self.figures = LabFigures()
        self.choices = choices(FORMATS)
        attributes = {"sample": "1/1", "formats": [one.label for one in self.choices]}
        self.errors = ErrorWriter(
            attributes, len(self.choices), self.pipeline.post, budget or NoLimit(), self.figures  # type: ignore[arg-type]
        )  # fmt: skip

    def measure(self, sequences: Sequence[int], *, key: Key, values: np.ndarray, **moment: int) -> None:  # type: ignore[type-arg]
        """Write the errors of float32 records of one moment."""
        rows = []
        for sequence in sequences:
            errors, problems = measured_bits(values, "float32", self.choices)
            define = Define(id=0, key=key, dtype="float32")
            copy = RecordCopy(
                self.run_id, self.client, sequence, define, Moment(**moment), values.shape, values.nbytes, (0, 0),
                lambda _copy, _committed: None,
            )  # fmt: skip
            rows.append((copy, pack_row(StoredErrors(self.client, sequence, errors, problems))))
        self.flush()
        self.errors.write(self.run_id, rows)
        # The rows before it are written and counted.
        self.pipeline.post(self.run_id, lambda _: None).result(timeout=60)


def values_of(layer: int, step: int) -> np.ndarray:  # type: ignore[type-arg]
    """The elements of a record."""
    return np.random.default_rng(100 * layer + step).standard_normal((8, 64)).astype("f4")


def measured_run(root: Path, name: str = "run", *, layers: int = 2, steps: int = 3) -> Path:
    """Write a sealed run of float32 records with the errors of each: one series for each layer."""
    writer = MeasuredWriter(root, run_id=name, node="node0")
    for step in range(steps):
        for layer in range(layers):
            key = linear_key(layer=layer, module=f"blocks.{layer}.fc", quant_type="fp32")
            values = values_of(layer, step)
            sequence = writer.put(key, "float32", values, iteration=step)
            writer.measure([sequence], key=key, values=values, iteration=step)
    writer.close()
    return root / f"{name}.zarr"


def errors_in(store: Store) -> dict[tuple[int | None, int], list[str]]:
    """The labels of the errors of each record that has any, by layer and iteration."""
    return {
        (one.key.layer, record.iteration): list(record.errors)
        for one in store.series
        for record in one
        if record.errors
    }
