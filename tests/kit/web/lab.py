"""Records with the errors that a lab has measured, in a store of a test."""

from __future__ import annotations

import numpy as np

from capd.analyze.format_choice import choices
from capd.lab.measuring import measured_bits
from capd.lab.stored_errors import StoredErrors, pack_row
from capd.server.lab.copies import RecordCopy
from capd.server.lab.error_writer import ErrorWriter
from capd.server.lab.outcomes import LabFigures
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define
from tests.kit.store.cli import StoreWriter
from tests.kit.store.writing import NoLimit

__all__ = ["FORMATS", "LabRows"]

FORMATS = "mxfp8,hifp8"


class LabRows:
    """Puts bfloat16 records and their errors, as a daemon with [lab] formats = FORMATS does."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer, self._choices = writer, choices(FORMATS)
        attributes = {"formats": FORMATS, "sample": "1/1"}
        self._rows = ErrorWriter(
            attributes, len(self._choices), writer._pipeline.post, NoLimit(), LabFigures()  # type: ignore[arg-type]
        )  # fmt: skip

    def put(self, run: str, key: Key, bits: np.ndarray, moment: Moment) -> None:
        sequence = self._writer._sequence
        self._writer.put(run, key, bits, "bfloat16", moment)
        row = StoredErrors(self._writer.client, sequence, *measured_bits(bits, "bfloat16", self._choices))
        copy = RecordCopy(
            run, self._writer.client, sequence, Define(id=0, key=key, dtype="bfloat16"), moment, bits.shape,
            bits.nbytes, None, lambda *_: None,  # type: ignore[arg-type]
        )  # fmt: skip
        self._rows.write(run, [(copy, pack_row(row))])
