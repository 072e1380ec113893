"""Scalars that are read for commands: a damaged one costs the others nothing."""

from __future__ import annotations

from pathlib import Path

import capd
from capd.io.scalar_table import readable_scalars
from tests.kit.store.scalars import damage_scalar, write_scalars


def test_a_damaged_scalar_is_skipped_with_its_reason(tmp_path: Path) -> None:
    run = write_scalars(tmp_path, "run", [[0.5, 0.1], [0.25, 0.75]], [1.0])
    damage_scalar(run, "loss", 1)

    found, skipped = readable_scalars(capd.open(run))
    assert [(one.name, one.rank, one.values.tolist()) for one in found] == [
        ("loss", 0, [0.5, 0.1]),
        ("rate", 0, [1.0]),
    ]
    assert [(one.name, one.damaged) for one in skipped] == [("scalar loss of rank 1", True)]
    assert skipped[0].reason
