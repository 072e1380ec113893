"""The documentation site: its links lead where they lead on GitHub, and its pictures are there and small."""

from __future__ import annotations

import inspect
import re
from types import ModuleType

import pytest

import capd.formats
import capd_client
from tests.docs.site_pages import OUTSIDE, followed
from tests.kit.paths import REPOSITORY

PICTURES = REPOSITORY / "docs" / "pictures"
MOST_NBYTES = 1 << 20
PAGES = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("faq.md", "see [a](cli.md#b)", "see [a](cli.md#b)"),
        ("faq.md", "[a](../SECURITY.md)", "[a](security.md)"),
        ("faq.md", "[a](../capd/errors.py)", "a"),
        ("faq.md", "[a](https://zarr.dev) [b](#c)", "[a](https://zarr.dev) [b](#c)"),
        ("design/reading.md", "[a](../measurements.md) [b](README.md)", "[a](../measurements.md) [b](README.md)"),
        ("index.md", "[a](docs/faq.md#b) [c](CONTRIBUTING.md)", "[a](faq.md#b) [c](contributing.md)"),
        ("index.md", '<img src="docs/pictures/x.webp">', '<img src="pictures/x.webp">'),
        ("megatron.md", "[a](../../docs/cli.md)", "[a](cli.md)"),
        ("tutorial.md", "![a](pictures/x.webp)", "![a](pictures/x.webp)"),
    ],
)  # fmt: skip
def test_a_link_of_a_page_leads_where_it_leads_in_the_repository(page: str, text: str, expected: str) -> None:
    assert followed(text, page) == expected


@pytest.mark.parametrize("package", [capd_client, capd.formats])
def test_the_reference_has_every_public_function(package: ModuleType) -> None:
    page = (REPOSITORY / "docs" / "api.md").read_text()
    functions = [name for name in package.__all__ if inspect.isfunction(getattr(package, name))]

    assert len(functions) >= 3
    assert [name for name in functions if f".{name}\n" not in page] == []


def test_the_pages_from_outside_of_docs_exist() -> None:
    assert [source for source in OUTSIDE if not (REPOSITORY / source).is_file()] == []


def test_the_first_page_is_short() -> None:
    english, chinese = ((REPOSITORY / name).read_text() for name in ("README.md", "README.zh.md"))

    assert len(english.split()) <= 600
    # A Chinese character counts as a word. Other words have a letter or a digit, unlike marks of a table.
    words = re.findall(r"[\u4e00-\u9fff]|[^\s\u4e00-\u9fff]*[A-Za-z0-9][^\s\u4e00-\u9fff]*", chinese)
    assert len(words) <= 1000


@pytest.mark.parametrize(
    "variant", ["bare copies", "**capd**", "synchronous `.cpu()` + statistics + `torch.save`"]
)
@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_the_first_page_has_the_measured_times(name: str, variant: str) -> None:
    measured = (REPOSITORY / "docs" / "measurements.md").read_text()
    figure = re.search(rf"^\| {re.escape(variant)} \| \**([\d.]+)", measured, re.MULTILINE)

    assert figure
    assert f"{figure[1]} ×" in (REPOSITORY / name).read_text()


def test_the_pictures_are_small_and_each_is_shown_somewhere() -> None:
    pictures = sorted(PICTURES.iterdir())
    shown = "".join(page.read_text() for page in PAGES)

    assert len(pictures) >= 3
    assert sum(picture.stat().st_size for picture in pictures) <= MOST_NBYTES
    assert [picture.name for picture in pictures if f"pictures/{picture.name}" not in shown] == []


def test_every_picture_of_a_page_exists() -> None:
    named = re.compile(r'(?:!\[[^\]]*\]\(|\bsrc(?:set)?=")(?!https?:)([^)"]+)')
    shown = [(page, name) for page in PAGES for name in named.findall(page.read_text())]

    assert len(shown) >= 8
    assert [(page.name, name) for page, name in shown if not (page.parent / name).is_file()] == []
