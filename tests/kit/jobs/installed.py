"""A venv with what an installation of capd leaves in its site-packages, for tests of start-up files."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

__all__ = ["Installed"]

_ROOT = Path(__file__).parents[3]


class Installed:
    """The venv, with capd as `pip install -e` installs it."""

    def __init__(self, root: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True, timeout=60)
        self.python = root / "bin/python"
        self.site = next(root.glob("lib/python*/site-packages"))
        self.install()

    def install(self) -> None:
        """Install capd again. What tests have added is gone."""
        for path in self.site.iterdir():
            path.unlink()
        wheel = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
            "wheel"
        ]
        (self.site / "_capd.pth").write_text(f"{_ROOT}\n")
        for file, place in wheel["force-include"].items():
            (self.site / place).write_text((_ROOT / file).read_text())

    def install_requirements(self) -> None:
        """Let it import what this Python does."""
        places = [place for place in sys.path if place.endswith("site-packages")]
        (self.site / "requirements.pth").write_text("\n".join(places))

    def run(self, *arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run its Python with this environment, from which variables of capd and Python are taken."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CAPD_", "PYTHON"))}
        return subprocess.run(
            [self.python, *arguments],
            env={**inherited, **environ}, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
