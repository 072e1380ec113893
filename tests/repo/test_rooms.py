"""The folders of the sources: each has one job that CONTRIBUTING names, few files, and class names of its own."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.paths import REPOSITORY

SOURCES = ("capd", "capd_client")
MOST_FILES = 15
# Folders that are no packages: what lies there is found by its path.
PATHS = ("capd_client/bootstrap", "capd_client/nvdlfw_features")


def folders(*tops: str) -> Iterator[tuple[str, list[Path]]]:
    """Each folder below `tops` that has Python files, and these files."""
    for top in tops:
        for place in sorted([REPOSITORY / top, *(REPOSITORY / top).rglob("*/")]):
            files = sorted(place.glob("*.py"))
            if files:
                yield str(place.relative_to(REPOSITORY)), files


def first_sentence(file: Path) -> str:
    """The docstring of a file up to its first full stop, on one line."""
    text = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split())
    return text.split(". ")[0].rstrip(".")


@pytest.mark.parametrize("top", [*SOURCES, "tests", "benchmarks"])
def test_a_folder_has_few_files(top: str) -> None:
    crowded = {
        folder: len(files)
        for folder, files in folders(top)
        if len([file for file in files if file.stem not in ("__init__", "conftest")]) > MOST_FILES
    }
    assert crowded == {}


def test_a_folder_of_the_reports_page_has_few_files() -> None:
    assets = REPOSITORY / "capd" / "report" / "assets"
    files = {
        place.name: [one for one in place.iterdir() if one.is_file()]
        for place in [assets, *assets.glob("*/")]
    }
    assert files.keys() == {"assets", "charts", "sections"}
    assert {name: len(each) for name, each in files.items() if len(each) > MOST_FILES} == {}


def test_every_folder_says_its_one_job_and_contributing_repeats_it() -> None:
    page = (REPOSITORY / "CONTRIBUTING.md").read_text()
    rows = [
        f"| `{folder}/` | {first_sentence(REPOSITORY / folder / '__init__.py')} |"
        for folder, files in folders(*SOURCES)
        if folder not in PATHS
    ]
    assert [row for row in rows if row not in page] == [], "add these rows to 'Where things are'"
    named = [line for line in page.splitlines() if line.startswith(("| `capd/", "| `capd_client/"))]
    assert [line for line in named if line not in rows and not any(path in line for path in PATHS)] == []


def test_no_two_classes_of_a_package_have_one_name() -> None:
    places = defaultdict(list)
    for top in SOURCES:
        for _, files in folders(top):
            for file in files:
                for node in ast.walk(ast.parse(file.read_text())):
                    if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                        places[top, node.name].append(file.name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
