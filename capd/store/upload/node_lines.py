"""The files of a node that go up as lines: its alerts, and the keeps of its flight recorder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from capd.store.alerts.file import alerts_path, whole_lines
from capd.store.keeps.file import keeps_path, whole_keep_lines
from capd.store.segments.manifest import Manifest, lines_change

__all__ = ["NodeLines", "read_node_lines"]


@dataclass(frozen=True, slots=True)
class NodeLines:
    """The whole lines of a node's files."""

    alerts: bytes = b""
    keeps: bytes = b""

    def change(self, manifest: Manifest) -> bool:
        """Return whether they are other ones than those that a manifest names."""
        return lines_change(manifest.alerts, self.alerts) or lines_change(manifest.keeps, self.keeps)


def read_node_lines(run: Path, node: str) -> NodeLines:
    """Read the lines of a node of a local run. Raises StoreError and OSError."""
    return NodeLines(whole_lines(alerts_path(run, node)), whole_keep_lines(keeps_path(run, node)))
