"""What shells are offered at TAB, through the protocols of bash, zsh and fish, and through a real bash."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.store.cli import Result
from tests.kit.store.scalars import write_scalars
from tests.kit.tiers import rows

Capd = Callable[..., Result]
HEAVY = {"torch", "zarr", "numpy", "pandas", "matplotlib"}


def protocol(shell: str, *words: str) -> dict[str, str]:
    """The variables with which a shell asks for the words that continue these; the last one may be begun."""
    lines = "\n".join(("capd", *words))
    typed = {"COMP_WORDS": lines, "COMP_CWORD": str(len(words))} if shell == "bash" else {
        "_TYPER_COMPLETE_ARGS": " ".join(("capd", *words)), "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }  # fmt: skip
    return {"_CAPD_COMPLETE": f"complete_{shell}", **typed}


def offered(capd: Capd, *words: str, cwd: Path | None = None) -> list[str]:
    done = capd(cwd=cwd, **protocol("bash", *words))
    assert (done.code, done.err) == (0, "")
    return done.out.split()


@pytest.fixture
def ask(capd: Capd, store_root: Path) -> Callable[..., list[str]]:
    """What is offered in the directory beside the store."""
    return lambda *words: offered(capd, *words, cwd=store_root.parent)


def test_values_of_the_run_are_offered_by_its_catalog(
    ask: Callable[..., list[str]], store_root: Path
) -> None:
    store = store_root.name

    assert ask("ls", store, "--layer", "") == ["0", "2"]
    assert ask("ls", store, "--rank", "0,") == ["0,1"]
    assert ask("ls", store, "--quant-type", "f") == ["fp32"]
    assert ask("export", store, "--module", "blocks.2") == ["blocks.2.attn.q"]
    assert ask("report", store, "--tensor", "g") == ["grad_output"]
    assert ask("compare", store, "--between", "") == [
        f"{field}=" for field in ("quant_type", "rank", "tensor_name", "layer", "phase", "layer_type", "operation",
                                  "component", "module", "stack")
    ]  # fmt: skip
    assert ask("compare", store, "--between", "rank=0,") == ["rank=0,1"]
    # The run that --run names has one series.
    assert ask("ls", store, "--run", "first", "--layer", "") == ["0"]


def test_stores_runs_and_series_are_offered(ask: Callable[..., list[str]], store_root: Path) -> None:
    store = store_root.name
    runs = [f"{store}/first.zarr", f"{store}/second.zarr"]

    assert ask("stats", store) == [store, *runs]
    assert ask("verify", f"{store}/s") == runs[1:]
    assert ask("compare", runs[0], f"{store}/") == runs
    assert ask("ls", store, "--run", "") == ["second", "first"]
    for command in ("rm", "pin", "unpin", "tag"):
        assert ask(command, f"{store}/s") == runs[1:]
    for command in ("runs", "prune", "gc"):
        assert ask(command, store) == [store]
    assert ask("rm", runs[1], "--series", "bf16/rank0/")
    assert ask("cp", f"{store}/s") == runs[1:]
    assert ask("merge", runs[0], f"{store}/") == runs
    assert ask("ls", store, "--attempt", "l") == ["latest"]
    found = ask("show", store, "bf16/rank0/")
    assert found
    assert all(path.startswith("bf16/rank0/") for path in found)


def test_names_of_runs_and_tags_of_the_default_store_are_offered(capd: Capd, tmp_path: Path) -> None:
    write_scalars(tmp_path / "captures", "mine", [[0.5]], [1.0])
    assert capd("tag", tmp_path / "captures" / "mine.zarr", "paper").code == 0

    assert "mine" in offered(capd, "rm", "m", cwd=tmp_path)
    assert offered(capd, "prune", "--keep-tag", "p", cwd=tmp_path) == ["paper"]
    assert offered(capd, "tag", "mine", "", cwd=tmp_path) == ["paper"]


def test_scalars_are_offered_where_a_command_takes_them(capd: Capd, tmp_path: Path) -> None:
    run = str(write_scalars(tmp_path, "run", [[0.5]], [1.0]))

    assert offered(capd, "ls", run, "--tensor", "") == ["input"]
    assert offered(capd, "ls", run, "--scalars", "--tensor", "") == ["loss", "rate"]
    assert offered(capd, "show", run, "l") == ["loss"]


def test_words_of_commands_are_offered(ask: Callable[..., list[str]]) -> None:
    assert ask("re") == ["replay", "report"]
    assert ask("ls", "x", "--sort", "r") == ["records", "raw_bytes"]
    assert ask("ls", "x", "--by", "op") == ["operation"]
    assert ask("compare", "x", "--by", "layer,i") == ["layer,iteration"]
    assert ask("compare", "x", "--formats", "hifp8,mxfp") == ["hifp8,mxfp8", "hifp8,mxfp6", "hifp8,mxfp4"]
    assert ask("du", "x", "--by", "run,q") == ["run,quant_type"]
    assert ask("plot", "x", "heat") == ["heatmap"]
    assert ask("plot", "x", "heatmap", "--metric", "s") == ["sqnr", "saturation"]
    assert ask("plot", "x", "trend", "--metric", "s") == ["scales"]
    assert ask("metrics", "x", "--metric", "rank,s") == ["rank,scales"]
    assert ask("export", "--to", "n") == ["npz"]
    assert ask("run", "--policy", "") == ["drop", "block", "thin", "stats"]


@pytest.mark.parametrize("place", rows(["nothing", "empty", "damaged"], ["damaged"]))
def test_where_there_is_nothing_to_read_nothing_is_offered_and_nothing_said(
    place: str, ask: Callable[..., list[str]], tmp_path: Path
) -> None:
    store = tmp_path / place
    if place != "nothing":
        node = store / "r.zarr/.capd/node=n"
        node.mkdir(parents=True)
        (store / "r.zarr/zarr.json").write_text("{}")
    if place == "damaged":
        (node / "catalog.sqlite").write_bytes(b"no database" * 999)

    for words in (("--layer", ""), ("--between", "rank="), ("--tensor", "x"), ("--by", "no_field")):
        assert ask("compare", str(store), *words) == []


def test_names_that_a_shell_would_read_otherwise_are_not_offered(capd: Capd, tmp_path: Path) -> None:
    for name in ("plain.zarr", "two words.zarr", "$(id).zarr", "it's.zarr"):
        (tmp_path / name).mkdir()

    assert offered(capd, "ls", "", cwd=tmp_path) == ["plain.zarr"]


@pytest.mark.parametrize(
    ("shell", "expected"),
    [("zsh", '_arguments \'*: :(("0"\n"2"))\''), ("fish", "0\n2"), ("bash", "0\n2")],
)
def test_each_shell_is_answered_in_its_own_way_without_heavy_imports(
    shell: str, expected: str, store_root: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "capd"],
        env={**os.environ, **protocol(shell, "ls", str(store_root), "--layer", "")},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    (*lines,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout.rstrip("\n")) == (0, expected)
    assert all(line.startswith("import time:") for line in lines)
    assert not HEAVY & {line.rpartition("|")[2].strip() for line in lines}


def test_a_real_bash_completes(store_root: Path) -> None:
    words = f"capd ls {store_root} --by comp"
    script = f"""
        eval "$(_CAPD_COMPLETE=source_bash capd)"
        COMP_WORDS=({words}); COMP_CWORD=4
        $(complete -p capd | sed 's/.*-F \\([^ ]*\\).*/\\1/') capd
        echo "${{COMPREPLY[@]}}"
    """
    place = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={**os.environ, "PATH": f"{place}:{os.environ['PATH']}"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert (done.stdout, done.stderr) == ("component\n", "")
