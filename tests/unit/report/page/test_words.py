"""The strings of the page: each is in words.js, in English and in Chinese, and none is written past it."""

from __future__ import annotations

import ast
import inspect
import json
import re

from capd import phrase
from capd.analyze.verdict import sentences as verdict_sentences
from capd.report import names
from capd.report.page.plain import METRICS
from tests.kit.paths import REPOSITORY

ASSETS = REPOSITORY / "capd" / "report" / "assets"
SAID = re.compile(r'\b(?:say|word)\(\s*"((?:[^"\\]|\\.)*)"')
TEXT = re.compile(
    r"(?:\b(?:section|nothing|table|figure)\(|\b(?:text|label|corner|placeholder|unit): |"
    r'"aria-label": )("[A-Za-z][^"]*")'
)
STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
SENTENCE = re.compile(r"[a-z]{2} [a-z]{2}")
# What comes before a string of several words that nobody reads, or that is in the table.
BEFORE = ("say(", "word(", "class: ")
ENTRY = re.compile(r'^  ("(?:[^"\\]|\\.)*"): ("(?:[^"\\]|\\.)*"),$', re.MULTILINE)
# Words that Chinese reports use as they are: names, and capd's own words (docs/report.zh.md).
ALIKE = {
    "SQNR (dB)",
    "HiFP8",
    "MSE",
    "NaN",
    "Inf",
    "rank",
    "rank {0}",
    "run",
    "series",
    "Series",
    "dtype",
    "tensor",
    "{0} SQNR (dB)",
}
# Strings of the scripts that are no text, or the same in all languages.
AS_IS = {'"NaN"', '"Inf"', '"capd report "', '"12px system-ui, sans-serif"'}


def sources() -> dict[str, str]:
    """The hand-written scripts that draw the page, by their names."""
    return {
        one.name: one.read_text(encoding="utf-8")
        for one in ASSETS.rglob("*.js")
        if not one.name.startswith(("uPlot", "words", "language"))
    }


def sentences(source: str) -> list[str]:
    """The strings of several words in a script that neither `say` nor `word` is given."""
    code = re.sub(r"^\s*(//|/?\*).*$|(^|\s)// .*$", "", source, flags=re.MULTILINE)
    return [
        found[0]
        for found in STRING.finditer(code)
        if SENTENCE.search(found[0]) and not code[: found.start()].endswith(BEFORE)
    ]


def words() -> dict[str, str]:
    found = ENTRY.findall((ASSETS / "words.js").read_text(encoding="utf-8"))
    chinese = {json.loads(english): json.loads(other) for english, other in found}
    assert len(chinese) == len(found), "a string is in words.js twice"
    return chinese


def phrases() -> set[str]:
    """The templates of the phrases that Python gives the page: what `Phrase` is given, and texts with places."""
    nodes = [
        node
        for module in (phrase, verdict_sentences, names)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
    ]
    given = [
        node.args[0] for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "Phrase"
    ]
    texts = {each.value for one in given for each in ast.walk(one) if isinstance(each, ast.Constant)}
    places = {node.value for node in nodes if isinstance(node, ast.Constant)}
    return {
        text
        for text in texts
        | {each for each in places if isinstance(each, str) and re.match(r"\{0\}|; \{0\}", each)}
        if isinstance(text, str)
    }


def said() -> set[str]:
    texts = {json.loads(f'"{text}"') for source in sources().values() for text in SAID.findall(source)}
    # Formulas without words are alike in all languages.
    return (
        texts
        | phrases()
        | {text for text in METRICS.values() if " in " in text or "values" in text or "before" in text}
    )


def test_each_string_of_the_page_has_its_chinese_and_each_entry_is_used() -> None:
    assert {"missing": said() - words().keys(), "unused": words().keys() - said()} == {
        "missing": set(),
        "unused": set(),
    }


def test_chinese_is_chinese_and_has_the_same_places_for_values() -> None:
    for english, chinese in words().items():
        assert sorted(set(re.findall(r"\{\d\}", chinese))) == sorted(set(re.findall(r"\{\d\}", english))), (
            english
        )
        letters = re.sub(r"\{\d\}", "", english)
        if english not in ALIKE and re.search("[A-Za-z]{3}", letters):
            assert re.search("[\u3001\u4e00-\u9fff]", chinese) or chinese == "Tensor", english


def test_no_script_writes_a_text_past_the_table() -> None:
    past = {
        name: [text for text in (*TEXT.findall(source), *sentences(source)) if text not in AS_IS]
        for name, source in sources().items()
    }
    assert {name: texts for name, texts in past.items() if texts} == {}
