"""The commands that read a run give the same answers for an address as for the run on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from capd.store.objects.address import Address
from tests.kit.objects.said import SERIES, Capd, same, written
from tests.kit.objects.uploaded import publish


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "RUN"),
        ("ls", "RUN", "--by", "tensor_name"),
        ("ls", "RUN", "--scalars"),
        ("show", "RUN", SERIES),
        ("show", "RUN", f"{SERIES}#1"),
        ("show", "RUN", "loss"),
        ("stats", "RUN"),
        ("stats", "RUN", "--drops"),
        ("compare", "RUN", "--formats", "mxfp8"),
        ("compare", "RUN", "--between", "tensor_name=input,weight"),
    ],
    ids=" ".join,
)
def test_a_command_says_the_same(
    capd: Capd, tmp_path: Path, prefix: Address, arguments: tuple[str, ...]
) -> None:
    run = written(tmp_path)
    assert same(capd, publish(run, prefix), run, *arguments)
