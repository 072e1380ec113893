"""What the tests of tensor files share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.store.pt_files import SEED_NAME


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """`save(object, name, **torch.save options)` writes a file below tmp_path/logs."""

    def write(content: Any, name: str = SEED_NAME, **options: Any) -> Path:
        path = tmp_path / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path, **options)
        return path

    return write
