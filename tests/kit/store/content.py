"""What a run holds, as values that two runs can be compared by."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from capd.store.read.store import open_store
from capd_client.protocol.key import Moment


def content_of(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Every record of every series of tensors, by the series' path, bit for bit."""
    found = {}
    for series in open_store(run).series:
        if series.kept != "tensor":
            continue
        found[series.path] = [
            {
                "key": series.key,
                "dtype": series.dtype,
                "moment": tuple(getattr(record, name) for name in Moment.__struct_fields__),
                "shape": record.shape,
                "device": record.device,
                "flags": (record.requires_grad, record.is_leaf),
                "metadata": record.metadata,
                "attributes": record.attributes,
                "stats": repr(asdict(record.stats)),  # NaN equals itself there
                "bits": series.numpy(position).tobytes(),
            }
            for position, record in enumerate(series.records)
        ]
    return found
