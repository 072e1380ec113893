"""Runs sglang's comparator on a machine without a GPU.

    python -m tests.kit.exchange.sglang_comparator PACKAGES ARGUMENTS…

The package's own root imports CUDA libraries, which the comparator does not use. So empty modules stand for the root.
The comparator alone is loaded from PACKAGES, where `pip install --no-deps --target` put it.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path


class _Stand(types.ModuleType):
    """A module whose functions are never called here."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: "cpu"


def main() -> None:
    """Replace the root packages, then run the comparator with the other arguments."""
    packages, arguments = Path(sys.argv[1]), sys.argv[2:]
    sys.path.insert(0, str(packages))
    for name in ("sglang", "sglang.srt"):
        package = types.ModuleType(name)
        package.__path__ = [str(packages.joinpath(*name.split(".")))]
        sys.modules[name] = package
    for name in (
        "sglang.srt.managers",
        "sglang.srt.managers.io_struct",
        "sglang.srt.runtime_context",
        "sglang.srt.utils",
    ):
        stand = _Stand(name)
        stand.__path__ = []
        sys.modules[name] = stand
    sys.argv = ["comparator", *arguments]
    importlib.import_module("sglang.srt.debug_utils.comparator.entrypoint").main()


if __name__ == "__main__":
    main()
