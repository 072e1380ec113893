"""Runs the tiny GPT of `tests.kit.models.megatron_layouts` in a layout, captured, each into a run of its own."""

from __future__ import annotations

from pathlib import Path

from tests.kit.jobs.captured import run_captured
from tests.kit.models.megatron_layouts import Layout

__all__ = ["Layout", "run_layout"]


def run_layout(layout: Layout, directory: Path, name: str = "job", **settings: str) -> Path:
    """Train in a layout below `capd run`; returns the store. settings: environment."""
    job = "tests.kit.models.megatron_layouts"
    return run_captured(directory, name, job, layout.json(), ranks=layout.ranks, **settings)
