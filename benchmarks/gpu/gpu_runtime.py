"""The runtime of a GPU: torch.cuda, or its stand-in without a GPU. It imports nothing of capd."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["NO_GPU", "runtime"]

# The exit code without a GPU.
NO_GPU = 2


def runtime() -> Any:
    """Return torch.cuda. Without a GPU, return the tests' stand-in for its streams and events."""
    if torch.cuda.is_available():
        return torch.cuda
    root = str(Path(__file__).parents[2])
    if root not in sys.path:
        sys.path.append(root)
    return importlib.import_module("tests.kit.gpu.stand_in_streams")
