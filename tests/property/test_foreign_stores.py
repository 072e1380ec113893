"""A store that somebody else made: every command gives an answer or a clear error, in bounded time and memory.

Each example changes documents and catalog of a small store. Where `capd verify` then calls it sound, everything that is
read from it is what was read before. CI runs a slice; the slow tier as many as CAPD_FUZZ_EXAMPLES says.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import capd
from tests.kit.tiers import rows
from tests.property.kit.foreign_stores import BASES, DEEP, GONE, SCRIPTS, TABLES, TEXTS, Change, build, change

EXAMPLES = int(os.environ.get("CAPD_FUZZ_EXAMPLES", "2000"))
SLICE = 3
PHASES = (Phase.explicit, Phase.generate)  # an example is one or two changes: nothing to shrink

numbers = st.sampled_from(
    [-1, 0, 1, 2, 3, 1.5, 4096, 2**31, 2**60, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 1e308, 1e-300]
)
words = st.sampled_from(
    ["", "zzz", "../../x", "a/b", "\0", "\ud800", "x" * 5000, "int64", "-1", "zstd:1", DEEP]
)
nasty: st.SearchStrategy[Any] = (
    numbers
    | words
    | st.sampled_from([None, True, float("inf"), float("nan"), [], {}, [[1]], [2**60, 2**60], GONE])
)
index = st.integers(0, 200)
cells = st.one_of(
    st.sampled_from([-1, 0, 1, 2, 1.5, 2**31, 2**60, 2**63 - 1, -(2**63), None, float("inf")]),
    st.sampled_from(["", "zzz", "[1]", "[[1]]", "[-1, 2]", "[1e999]", "[" * 20_000, "{}", "4", "\0"]),
    st.sampled_from([b"", b"zzz", b"\xc0", b"\xdd\xff\xff\xff\xff", b"\x91" * 20_000, bytes(16)]),
)
changes = st.one_of(
    st.tuples(st.just("json"), index, index, nasty),
    st.tuples(st.just("document"), index, st.sampled_from(list(TEXTS))),
    st.tuples(
        st.just("catalog"), st.sampled_from(["", "-wal", "-shm", "-journal"]), st.sampled_from(list(TEXTS))
    ),
    st.tuples(st.just("byte"), st.integers(0, 2**17), st.integers(0, 255)),
    st.tuples(st.just("script"), st.integers(0, len(SCRIPTS) - 1)),
    st.sampled_from([(table, column) for table, columns in TABLES.items() for column in columns]).flatmap(
        lambda place: st.tuples(st.just("cell"), st.just(place[0]), st.just(place[1]), index, cells)
    ),
    st.tuples(
        st.just("blob"), st.sampled_from(["series", "records", "acked", "sessions"]), index, index, nasty
    ),
)
mutants = st.tuples(st.sampled_from(BASES), st.lists(changes, min_size=1, max_size=2))


class Reading:
    """Reads runs in processes of their own, and knows what the unchanged ones say."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.property.kit.foreign_reading"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._bases = build(root)
        self._paths = {
            base: [series.path for series in capd.open(run).series] for base, run in self._bases.items()
        }
        self._ask(str(self._bases["sealed"]), self._paths["sealed"], "")
        self._known = {base: self.of(base, [])["answers"] for base in BASES}

    def of(self, base: str, made: list[Change]) -> dict[str, Any]:
        """What the commands say of a run of this kind with these changes."""
        with tempfile.TemporaryDirectory(dir=self._root) as place:
            run = Path(place) / "run.zarr"
            shutil.copytree(self._bases[base], run)
            change(run, made)
            result = Path(place) / "result.json"
            self._ask(str(run), self._paths[base], str(result))
            assert self._process.stdout is not None
            end = int(self._process.stdout.readline())
            assert end == 0, f"the reading process ended with {end}"
            found: dict[str, Any] = json.loads(result.read_text().replace(place, ""))
            return found

    def _ask(self, *what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def hold(self, base: str, made: list[Change]) -> None:
        """Fail unless all is answered, and what is called sound is what it was."""
        found = self.of(base, made)
        assert not found["wrong"], "\n".join(found["wrong"])
        if found["answers"]["verify"]["code"] == 0:
            for name, answer in self._known[base].items():
                if name not in ("verify", "compare", "stats", "stats of drops"):
                    assert _plain(found["answers"][name]) == _plain(answer), name

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        assert self._process.stdout is not None
        self._process.stdout.close()


def _plain(answer: dict[str, Any]) -> tuple[int, str]:
    """Code and text; stored bytes may be wrong by a byte for each record, so these do not count."""
    lines = [line for line in answer["out"].splitlines() if "stored" not in line]
    return answer["code"], "\n".join(lines)


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
    made = Reading(tmp_path_factory.mktemp("foreign"))
    yield made
    made.close()


def test_the_unchanged_stores_are_sound(reading: Reading) -> None:
    for base in BASES:
        found = reading.of(base, [])
        assert not found["wrong"]
        assert {name: answer["code"] for name, answer in found["answers"].items() if answer["code"]} == {}


@pytest.mark.parametrize("script", rows(range(len(SCRIPTS)), [0]))
def test_a_catalog_with_other_tables_gives_an_answer_or_a_clear_error(reading: Reading, script: int) -> None:
    reading.hold("sealed", [("script", script)])


@pytest.mark.parametrize("how", rows(TEXTS, ["a pipe"]))
def test_whatever_stands_where_a_document_belongs_is_answered(reading: Reading, how: str) -> None:
    for document in (-1, -2, -3):
        reading.hold("sealed", [("document", document, how)])


@settings(max_examples=SLICE, suppress_health_check=[HealthCheck.too_slow])
@given(mutants)
@example(("sealed", [("json", 5, 0, [2**60, 2**60])]))
@example(("sealed", [("cell", "series", "tensor_name", 0, "zzz")]))
@example(("killed", [("json", 0, 38, -1)]))
@example(("sealed", [("json", 2, 195, -1)]))
@example(("killed", [("blob", "sessions", 172, 167, "")]))
def test_a_changed_store_gives_an_answer_or_a_clear_error(
    reading: Reading, mutant: tuple[str, list[Change]]
) -> None:
    reading.hold(*mutant)


@pytest.mark.fault
@pytest.mark.timeout(3600)
@settings(max_examples=EXAMPLES, phases=PHASES, suppress_health_check=[HealthCheck.too_slow])
@given(mutants)
def test_many_changed_stores_give_an_answer_or_a_clear_error(
    reading: Reading, mutant: tuple[str, list[Change]]
) -> None:
    reading.hold(*mutant)
