"""torch.cuda, or what stands in for it where there is no GPU; imports nothing of capd."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["NO_GPU", "runtime"]

NO_GPU = 2  # the exit code where there is none


def runtime() -> Any:
    """torch.cuda, or, where there is no GPU, the stand-in that the tests have for its streams and events."""
    if torch.cuda.is_available():
        return torch.cuda
    root = str(Path(__file__).parents[2])
    if root not in sys.path:
        sys.path.append(root)
    return importlib.import_module("tests.kit.gpu.stand_in_streams")
