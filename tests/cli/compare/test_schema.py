"""Every field that `capd compare --json` prints is in docs/json.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.store.cli import Result

SECTION = (
    (Path(__file__).parents[3] / "docs/json.md").read_text().split("## capd compare\n")[1].split("\n## ")[0]
)
KEY_FIELDS = {  # which the page names together, as "the key's fields"
    "quant_type", "rank", "layer", "phase", "layer_type", "operation", "component", "tensor_name", "module", "stack",
}  # fmt: skip


def fields(value: Any, *, named: bool = True) -> Iterator[str]:
    """The names of all fields; not those of entries by label, size, exponent or share."""
    if isinstance(value, list):
        for item in value:
            yield from fields(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if named:
                yield name
            by_label = name in ("errors", "block_ranges", "sweeps")
            of_numbers = name in ("options", "scales", "scale_exponents") or name.endswith("histogram")
            of_numbers |= name == "amax_exponents" or (name == "sqnr_db" and isinstance(item, dict))
            yield from () if of_numbers else fields(item, named=not by_label)


@pytest.mark.parametrize(
    "args",
    [
        ("{run}", "--formats", "mxfp8,nvfp4,hifp8", "--per-block"),
        ("{run}", "--formats", "mxfp8,hifp8"),
        ("{run}", "--sweep-scale", "--formats", "e4m3"),
        ("{run}", "{other}", "--records"),
    ],
)
def test_every_field_of_the_json_is_documented(
    capd: Callable[..., Result], store_root: Path, args: tuple[str, ...]
) -> None:
    runs = {"run": store_root / "second.zarr", "other": store_root / "second.zarr"}

    found = capd("compare", *(arg.format(**runs) for arg in args), "--json")

    names = set(fields(found.json))
    assert len(names) > 10
    assert sorted(name for name in names - KEY_FIELDS if f"`{name}`" not in SECTION) == []
