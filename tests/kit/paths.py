"""Paths that tests share: the repository, and packages that stand in for frameworks."""

from __future__ import annotations

from pathlib import Path

__all__ = ["REPOSITORY", "TE_STAND_IN"]

REPOSITORY = Path(__file__).parents[2]
TE_STAND_IN = Path(__file__).with_name("te_stand_in")
