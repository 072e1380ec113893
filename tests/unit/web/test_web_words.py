"""The strings of the live page: each has its Chinese, here or in the report's words, and none is written past them."""

from __future__ import annotations

import json
import re

from tests.kit.paths import REPOSITORY
from tests.unit.report.page import test_words as report

ASSETS = REPOSITORY / "capd" / "web" / "assets"
# The same in all languages, and a class of the style sheet.
AS_IS = {'"capd web "', '"%"', '"map clicked"'}


def sources() -> dict[str, str]:
    return {one.name: one.read_text() for one in ASSETS.rglob("*.js") if one.name != "words.js"}


def words() -> dict[str, str]:
    found = report.ENTRY.findall((ASSETS / "words.js").read_text())
    chinese = {json.loads(english): json.loads(other) for english, other in found}
    assert len(chinese) == len(found), "a string is in words.js twice"
    return chinese


def said() -> set[str]:
    return {json.loads(f'"{text}"') for source in sources().values() for text in report.SAID.findall(source)}


def test_each_string_has_its_chinese_and_each_entry_is_used() -> None:
    own, of_the_report = words(), report.words()
    assert said() - own.keys() - of_the_report.keys() == set()
    assert own.keys() - said() == set()
    assert own.keys() & of_the_report.keys() == set()


def test_chinese_has_the_same_places_for_values() -> None:
    for english, chinese in words().items():
        assert sorted(re.findall(r"\{\d\}", chinese)) == sorted(re.findall(r"\{\d\}", english)), english
        letters = re.sub(r"\{\d\}", "", english)
        if re.search("[A-Za-z]{3}", letters):
            assert re.search("[、-鿿]", chinese), english


def test_no_script_writes_a_text_past_the_table() -> None:
    past = {
        name: [
            text for text in (*report.TEXT.findall(source), *report.sentences(source)) if text not in AS_IS
        ]
        for name, source in sources().items()
    }
    assert {name: texts for name, texts in past.items() if texts} == {}


def test_a_folder_of_the_page_has_few_files() -> None:
    for place in (ASSETS, *ASSETS.glob("*/")):
        assert len([one for one in place.iterdir() if one.is_file()]) <= 15


def test_no_script_makes_markup_of_a_text() -> None:
    for name, source in sources().items():
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ):
            assert word not in source, name
