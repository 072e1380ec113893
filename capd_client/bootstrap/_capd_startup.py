"""The start of a Python process in a job of `capd run`: it has capd at hand, and waits for `import torch`.

Most processes of a job never import torch, or never train; what they pay is this file. capd_client itself is imported
with the first training forward of a model, so that until then its presence says that the job imported it.
"""

from __future__ import annotations

import os
import sys

from _capd_after_import import after_import
from _capd_notes import emulates, note, watches

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["begin"]

_HERE = os.path.dirname(os.path.abspath(__file__))


def begin() -> None:
    """Called once, by `sitecustomize`."""
    note("python")
    sys.meta_path.append(_Spare())
    if os.environ.get("CAPD_REPLACE_TENSOR_SAVER", "").strip().lower() in ("1", "true", "yes", "on"):
        sys.meta_path.insert(0, _Replacement())  # its calls say what is captured: no model is searched for
        sys.meta_path.append(_Parents())
    elif watches() or emulates():
        after_import("torch", _torch_imported)


def _torch_imported() -> None:
    note("torch")
    sys.path.insert(0, _HERE)
    try:
        import _capd_roots
    finally:
        sys.path.remove(_HERE)
    _capd_roots.begin()


class _Replacement:
    """Finds capd_client.tensor_saver under the name of Megatron's tensor_saver, which need not be there any more."""

    _name = "megatron.core.tensor_saver"

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        from importlib import import_module
        from importlib.machinery import ModuleSpec

        try:
            self._module = import_module("capd_client.tensor_saver")
        except Exception as error:  # then the job has its own
            note(f"problem {name} is not replaced: {error!r}")
            return None
        return ModuleSpec(name, self)  # type: ignore[arg-type]  # a loader by its methods

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary empty one, which does not stay."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = self._module
        note("replaced")


class _Parents:
    """Finds empty packages above that module where the job's Python has none: last, they shadow nothing.

    Any other module below them is missing as in every package that lacks it.
    """

    _names = ("megatron", "megatron.core")

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._names:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # a loader by its methods

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary empty one."""

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


class _Spare:
    """Finds capd_client beside this file where the job's Python has none of its own: last, it shadows nothing."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "capd_client":
            return None
        from importlib.util import spec_from_file_location

        package = os.path.dirname(_HERE)
        return spec_from_file_location(
            name, os.path.join(package, "__init__.py"), submodule_search_locations=[package]
        )
