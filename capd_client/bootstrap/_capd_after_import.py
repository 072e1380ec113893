"""The import follower: calls a function after a module's import, whenever that happens.

It leaves no trace in the import system. A finder at the head of `sys.meta_path` lets the other finders find the
module. It sets its own `exec_module` on their loader until that runs. Code that only looks
(`importlib.util.find_spec`), loads lazily or reloads sees no difference. When no function is waiting, the finder
removes itself.

The file imports nothing of capd, because it runs at the start of every Python of a job.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["after_import", "wait_no_more"]


def after_import(name: str, function: Callable[[], None]) -> None:
    """Call `function` after the import of module `name`. If the module is already imported, call it at once.

    The call is on the importing thread, at the end of the import. Its exceptions reach nobody.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _call(function)
    else:
        _finder.wait(name, function)


def wait_no_more(names: Sequence[str]) -> None:
    """Forget the functions that wait for the import of these modules."""
    _finder.forget(names)


def _call(function: Callable[[], None]) -> None:
    try:
        function()
    except Exception as error:
        import os

        if os.environ.get("CAPD_LOG", "").lower() == "debug":
            sys.stderr.write(f"capd: {getattr(function, '__qualname__', function)}: {error!r}\n")


class _Finder:
    def __init__(self) -> None:
        self._waiting: dict[str, list[Callable[[], None]]] = {}

    def wait(self, name: str, function: Callable[[], None]) -> None:
        self._waiting.setdefault(name, []).append(function)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            self._waiting.pop(name, None)
        self._leave_if_idle()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._waiting:
            return None
        for finder in tuple(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                self._follow(name, spec.loader)
                return spec
        return None

    def _follow(self, name: str, loader: object) -> None:
        run = getattr(loader, "exec_module", None)

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            # It is not None: see below.
            run(module)  # type: ignore[misc]
            self._imported(name)

        # The loader is an instance whose attributes only this import sees.
        if run is not None and type(getattr(loader, "__dict__", None)) is dict:
            vars(loader)["exec_module"] = exec_module

    def _imported(self, name: str) -> None:
        functions = self._waiting.pop(name, ())
        self._leave_if_idle()
        for function in functions:
            _call(function)

    def _leave_if_idle(self) -> None:
        if not self._waiting and self in sys.meta_path:
            sys.meta_path.remove(self)


_finder = _Finder()
