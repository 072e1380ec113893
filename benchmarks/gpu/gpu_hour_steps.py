"""The steps of the first hour with a GPU: the command of each, its time limit, and the results that stop the hour."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["NEEDED", "STEPS", "Step", "missing_packages"]

Row = dict[str, Any]

# Modules that capd, its daemon and its tests import, by the names of their packages.
NEEDED = {
    "annotated-types": "annotated_types", "donfig": "donfig", "google-crc32c": "google_crc32c",
    "hypothesis": "hypothesis", "msgspec": "msgspec", "numcodecs": "numcodecs", "numpy": "numpy",
    "pydantic": "pydantic", "pydantic-core": "pydantic_core", "pytest": "pytest", "pytest-timeout": "pytest_timeout",
    "typer": "typer", "typing-inspection": "typing_inspection", "zarr": "zarr",
}  # fmt: skip


def missing_packages() -> list[str]:
    """Return the packages that this interpreter lacks."""
    return [package for package, module in NEEDED.items() if importlib.util.find_spec(module) is None]


@dataclass(frozen=True)
class Step:
    """A script of this folder and its arguments.

    bare: it needs only torch. stops: returns why no step may follow, or None.
    """

    name: str
    script: str
    arguments: tuple[str, ...]
    limit_s: int
    # Added arguments of `--quick`. For tests they replace the arguments.
    quick: tuple[str, ...] = ("--quick",)
    bare: bool = False
    stops: Callable[[Row], str | None] = lambda result: None

    def command(self, quick: bool, link_gbps: float | None) -> list[str]:
        """Return the arguments after the script's name."""
        if self.script == "gpu_test_report.py":
            return ["--", *(self.quick if quick else self.arguments)]
        rate = ["--link-gbps", str(link_gbps)] if self.script == "gpu_capture.py" and link_gbps else []
        return [*self.arguments, *rate, *(self.quick if quick else ())]


def _lock_stops(result: Row) -> str | None:
    gap, code = (check["value"] for check in result["checks"][:2])
    if code:
        return "the driver refuses to page-lock: everything else would measure pageable copies"
    if gap > result["checks"][0]["must"]:
        return f"page-locking one chunk holds others up for {gap:.0f} ms: smaller chunks come first"
    return None


def _tests_stop(result: Row) -> str | None:
    failed = len(result["failed"])
    return f"{failed} tests failed: what is fast and wrong need not be measured" if failed else None


def _fact(name: str, limit_s: int, stops: Callable[[Row], str | None] = lambda result: None) -> Step:
    return Step(f"fact-{name}", "gpu_facts.py", (name,), limit_s, bare=name != "rows", stops=stops)


def _numbers(section: str, limit_s: int) -> Step:
    return Step(f"numbers-{section}", "gpu_capture.py", ("--rounds", "1", "--only", section), limit_s)


_QUICK_TESTS = "tests/integration/test_gpu_jobs.py"
_PYTEST = ("-q", "--timeout", "110", "-p", "no:cacheprovider")
_COMPILE = ("tests/gpu/test_cuda_compile.py", "tests/gpu/test_cuda_wrappers.py")
_LEFT_OUT = tuple(f"--ignore={path}" for path in _COMPILE)

STEPS = (
    _fact("machine", 60),
    _fact("lock", 180, _lock_stops),
    _fact("border", 60),
    _fact("link", 120),
    _fact("loading", 60),
    _fact("rows", 120),
    Step("constants", "gpu_constants.py", ("--table",), 120, bare=True),
    Step(
        "correctness",
        "gpu_test_report.py",
        ("tests/gpu", *_LEFT_OUT, "-m", "gpu", *_PYTEST),
        1500,
        quick=(_QUICK_TESTS, "-k", "small_captures", *_PYTEST),
        stops=_tests_stop,
    ),
    Step(
        "compile",
        "gpu_test_report.py",
        (*_COMPILE, "-m", "gpu", *_PYTEST),
        600,
        quick=(_QUICK_TESTS, "-k", "compiled_model and default", *_PYTEST),
    ),
    *(
        _numbers(section, limit_s)
        for section, limit_s in (
            ("calls", 180), ("transfer", 300), ("step", 420), ("host-bound", 420), ("memory", 90), ("small", 90),
            ("rows", 90), ("interference", 240),
        )
    ),
)  # fmt: skip
