"""What is imported when: the training job stays light, and so do the commands that people type all day."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "zarr", "pandas", "xarray", "dask", "matplotlib")


def loaded_by(code: str, modules: tuple[str, ...] = HEAVY) -> list[str]:
    """Which of `modules` a fresh interpreter has loaded after `code`."""
    script = f"{code}\nimport sys, json\nprint(json.dumps([m for m in {modules!r} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=dict(os.environ),
    )
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_importing_capd_loads_nothing_heavy() -> None:
    assert loaded_by("import capd; capd.open", (*HEAVY, "pydantic", "typer")) == []
    assert loaded_by("import capd", ("numpy",)) == []


def test_the_shared_half_of_the_client_needs_no_torch() -> None:
    shared = (
        "protocol.messages", "protocol.key", "protocol.selection", "protocol.dtypes", "protocol.statistics_row",
        "errors", "config.settings", "planning.whole", "planning.text", "planning.disk",
    )  # fmt: skip
    code = f"import {', '.join(f'capd_client.{name}' for name in shared)}"

    assert loaded_by(code, (*HEAVY, "numpy", "pydantic", "capd")) == []


def test_the_client_needs_none_of_the_daemons_packages() -> None:
    code = "import capd_client; capd_client.capture, capd_client.watch, capd_client.counters"

    assert loaded_by(code, ("zarr", "numcodecs", "pydantic", "typer", "capd")) == []


@pytest.mark.slow
def test_statistics_in_the_rank_load_no_compiler_until_they_are_prepared() -> None:
    code = "import capd_client.session.session, capd_client.devstats; capd_client.devstats.fill_row"

    assert loaded_by(code, ("triton", "torch._dynamo", "torch._inductor", "numpy.testing")) == []


def test_the_daemon_needs_no_torch() -> None:
    assert loaded_by("import capd.server.daemon", ("torch",)) == []


def test_no_verbs_module_loads_anything_heavy() -> None:
    load_all = "[importlib.import_module(verb.module) for verb in VERBS.values()]"

    assert loaded_by(f"import importlib\nfrom capd.cli.app import VERBS\n{load_all}") == []
