"""The start of a Python process in a job that capd watches: makes capd importable, and waits for `import torch`.

Most processes of a job never import torch, or never train. Their whole cost is this file. capd_client is imported
with the first training forward of a model. Until then its presence shows that the job imported it.
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
    """Begin the process. `sitecustomize` calls this function once."""
    note("python")
    sys.meta_path.append(_Spare())
    if os.environ.get("CAPD_REPLACE_TENSOR_SAVER", "").strip().lower() in ("1", "true", "yes", "on"):
        # The calls of tensor_saver name the captures, so no model is searched for.
        sys.meta_path.insert(0, _Replacement())
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
    """The finder of capd_client.tensor_saver under Megatron's name for it. Megatron's own need not exist any more."""

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
        except Exception as error:
            # The job then has its own.
            note(f"problem {name} is not replaced: {error!r}")
            return None
        # It has a loader's methods.
        return ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None for an ordinary empty module, which is then replaced."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = self._module
        note("replaced")


class _Parents:
    """The finder of empty parent packages of that module, if the job's Python has none.

    It is last and shadows nothing.

    Other modules below these packages are missing, as in every package without them.
    """

    _names = ("megatron", "megatron.core")

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._names:
            return None
        from importlib.machinery import ModuleSpec

        # Without a loader it is a namespace package, here one without a directory.
        return ModuleSpec(name, None, is_package=True)


class _Spare:
    """The finder of capd_client beside this file, if the job's Python has none. It is last and shadows nothing."""

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
