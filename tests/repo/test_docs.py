"""The documentation against the code: links, settings, drop reasons, verbs, public names."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import capd_client
from capd.cli.app import VERBS
from capd.cli.store.counters import Counters
from capd.cli.store.ls import FIELDS
from capd.config import DaemonSettings, RetentionSettings
from capd.drops import REMEDIES, REQUESTED, describe_drops
from capd_client import tensor_saver
from capd_client.config.file import FileSettings, WhenSettings
from capd_client.config.settings import _SETTINGS
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.rules.schema import RuleSettings
from tests.kit.paths import REPOSITORY

DESIGN = REPOSITORY / "docs" / "design"
TRACK_RECORD = REPOSITORY / "tests" / "track-record.md"
# The parts in docs/cli are read where docs/cli.md has them.
PAGES = sorted(
    {*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), TRACK_RECORD}
    - {*(REPOSITORY / "docs" / "cli").glob("*.md")}
)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(#[^)]*)?\)")
ENTRY = re.compile(r"^\*\*(.+)\*\*\n\n((?:- .*\n)+)", re.MULTILINE)
CHINESE_PAGES = (
    "quickstart", "tutorial", "migration", "migration-files", "migration-runs", "comparing", "report", "plots",
    "emulation", "cluster", "faq", "lifecycle",
)  # fmt: skip
CHINESE = sorted(path for path in PAGES if path.name.endswith(".zh.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def page(name: str) -> str:
    return (REPOSITORY / "docs" / f"{name}.md").read_text()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    targets = [target for target, _ in LINK.findall(path.read_text())]

    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_the_index_of_the_design_links_every_page_and_every_group() -> None:
    index = (DESIGN / "README.md").read_text()
    linked = {(target, (anchor or "#")[1:]) for target, anchor in LINK.findall(index)}
    pages = {path.name: path.read_text() for path in DESIGN.glob("*.md") if path.name != "README.md"}
    with_entries = {name: text for name, text in pages.items() if ENTRY.search(text)}

    assert {target for target, _ in linked} >= set(pages)
    assert len(with_entries) > 10
    for name, text in with_entries.items():
        groups = anchors("\n".join(re.findall(r"^## .*$", text, re.MULTILINE)))
        assert {anchor for target, anchor in linked if target == name and anchor} == groups, name


@pytest.mark.parametrize("path", sorted(DESIGN.glob("*.md")), ids=lambda path: path.name)
def test_every_link_of_a_design_page_leads_to_a_heading_that_exists(path: Path) -> None:
    missing = [
        target + anchor
        for target, anchor in LINK.findall(path.read_text())
        if anchor and anchor[1:] not in anchors((path.parent / target).read_text())
    ]

    assert missing == []


@pytest.mark.parametrize("path", sorted(DESIGN.glob("*.md")), ids=lambda path: path.name)
def test_every_design_entry_has_a_decision_its_reason_and_its_price(path: Path) -> None:
    text = path.read_text()
    entries = [re.findall(r"^- \*\*(\w+)\*\* \S", lines, re.MULTILINE) for _, lines in ENTRY.findall(text)]

    assert len(entries) == text.count("- **Decision**")
    assert [entry for entry in entries if entry != ["Decision", "Because", "Price"]] == []


def test_the_track_record_names_tests_that_exist() -> None:
    text = TRACK_RECORD.read_text()
    rows = re.findall(r"`(tests/[\w/]+\.py)`: ((?:`\w+`(?:, | and )?)+)", text)

    assert len(rows) > 100
    assert [
        file for file in re.findall(r"`(tests/[\w/]+\.py)`", text) if not (REPOSITORY / file).exists()
    ] == []
    assert [(file, missing_tests(file, names)) for file, names in rows if missing_tests(file, names)] == []


@pytest.mark.parametrize("path", CHINESE, ids=lambda path: path.name)
def test_a_chinese_page_has_the_code_blocks_names_and_figures_of_the_english_one(path: Path) -> None:
    english = english_page(path)
    chinese_text, english_text = path.read_text(), english.read_text()

    assert code_blocks(chinese_text) == code_blocks(english_text)
    assert heading_levels(chinese_text) == heading_levels(english_text)
    assert inline_code(chinese_text) == inline_code(english_text)
    assert table_figures(chinese_text) == table_figures(english_text)
    assert f"]({english.name})" in chinese_text.split("\n## ")[0]
    assert f"]({path.name})" in english_text.split("\n## ")[0]


@pytest.mark.parametrize("path", CHINESE, ids=lambda path: path.name)
def test_every_link_of_a_chinese_page_leads_to_a_heading_that_exists(path: Path) -> None:
    missing = [
        target + anchor
        for target, anchor in LINK.findall(path.read_text())
        if not (path.parent / target).exists()
        or (anchor and anchor[1:] not in anchors((path.parent / target).read_text()))
    ]

    assert missing == []


def test_the_first_pages_are_there_in_chinese() -> None:
    assert {path.relative_to(REPOSITORY).as_posix() for path in CHINESE} >= {
        "README.zh.md",
        *(f"docs/{name}.zh.md" for name in CHINESE_PAGES),
    }


def english_page(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".zh.md") + ".md")


def code_blocks(text: str) -> list[tuple[str, list[str]]]:
    """Language and lines of each block; comments, which are translated, left out."""
    return [
        (language, [re.sub(r"(^|\s+)#.*", "", line) for line in body.splitlines()])
        for language, body in BLOCK.findall(text)
    ]


def heading_levels(text: str) -> list[int]:
    return [match[0].index(" ") for match in HEADING.finditer(BLOCK.sub("", text))]


def inline_code(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", BLOCK.sub("", text)))


def table_figures(text: str) -> list[list[str]]:
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [re.findall(r"\d+(?:\.\d+)?", row) for row in rows]


def anchors(text: str) -> set[str]:
    """The headings as GitHub makes anchors of them."""
    headings = HEADING.findall(BLOCK.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_drop_reason_is_explained_and_has_a_remedy_or_was_chosen() -> None:
    reasons = {reason.value for reason in DropReason}

    assert set(REMEDIES) | REQUESTED == reasons
    assert set(REMEDIES).isdisjoint(REQUESTED)
    assert {reason for reason in reasons if f"| `{reason}` |" not in page("concepts")} == set()


def test_the_line_about_drops_names_every_reason_with_its_remedy() -> None:
    assert describe_drops({}) is None
    assert describe_drops({"disk_full": 0}) is None
    line = describe_drops({"disk_full": 3, "arena_full": 1200})
    assert line is not None
    assert line.startswith("1,203 captures were dropped: 1,200 arena_full (")
    assert "--max-disk" in line
    assert describe_drops({"sampled": 3}) is None
    line = describe_drops({"sampled": 3, "disk_full": 1})
    assert line is not None
    assert line.startswith("1 capture was dropped: 1 disk_full (")


def test_every_setting_of_the_daemon_is_documented() -> None:
    text = page("configuration")

    fields = [*DaemonSettings.model_fields, *RetentionSettings.model_fields]
    # Those of [quota], [upload], [lab] and [window] stand in tables of their own, under the keys that they have there.
    keys = [
        "policy" if field == "quota_policy" else re.sub("^(upload|lab|window)_", "", field)
        for field in fields
    ]
    assert [key for key in keys if f"| `{key}`" not in text] == []


def test_every_variable_that_the_client_reads_is_documented() -> None:
    files = (REPOSITORY / "capd_client").rglob("*.py")
    source = "".join(path.read_text() for path in files if path.parent.name != "bootstrap")
    read = set(re.findall(r'"(CAPD_[A-Z_]+)"', source))

    tables = ("when", "daemon", "quota", "upload", "lab", "window", "retention", "trigger")
    keys = {name for name in FileSettings.__struct_fields__ if name not in tables}
    keys |= {f"when.{name}" for name in WhenSettings.__struct_fields__}
    assert keys <= {setting.key for setting in _SETTINGS.values()}
    assert {key for key in keys if f"| `{key}` |" not in page("configuration")} == set()
    assert read >= {"CAPD_ENDPOINT", "CAPD_POLICY"}
    by_field = {f"CAPD_{field.upper()}" for field in DaemonSettings.model_fields}
    assert {name for name in read - by_field if f"`{name}`" not in page("configuration")} == set()


def test_every_verb_and_every_json_field_is_documented() -> None:
    assert [verb for verb in VERBS if f"## capd {verb}\n" not in page("cli")] == []
    assert [field for field in (*FIELDS, *Counters.model_fields) if f"`{field}`" not in page("json")] == []


def test_every_dtype_is_in_the_format_page() -> None:
    bits = [name for name in ITEM_NBYTES if name.startswith(("float8", "float4", "bfloat"))]

    assert [name for name in bits if name not in page("format")] == []


def test_the_clients_public_names_exist_and_are_shown_in_the_quickstart() -> None:
    assert set(capd_client.__all__) >= {"watch", "capture", "set_moment", "flush", "close", "counters"}
    assert all(callable(getattr(capd_client, name)) for name in capd_client.__all__)
    assert [
        name
        for name in ("watch", "capture", "set_moment")
        if f"capd_client.{name}(" not in page("quickstart")
    ] == []


def test_the_readme_names_the_commands_that_continuous_integration_runs() -> None:
    readme, ci = (REPOSITORY / "README.md").read_text(), (REPOSITORY / ".ci" / "run").read_text()

    assert "make test " in readme
    assert "make check " in readme
    assert "make test " in ci
    assert "check-static" in ci  # with `make test`, what `make check` is


def test_every_promise_names_tests_that_exist() -> None:
    sections = page("guarantees").split("\n## ")[1:]
    named = re.compile(r"- `(tests/[\w/]+\.py)`: (.*)")

    assert [section[:2] for section in sections] == [*(f"P{number}" for number in range(9)), "Ha"]
    for section in sections[:-1]:
        rows = named.findall(section)
        files = [file for file, _ in rows]
        assert rows, section
        assert sorted(files) == sorted(set(files)), "a file is listed twice"
        for file, tests in rows:
            assert missing_tests(file, tests) == [], file


def test_every_hazard_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (.*) \| (`tests/.*) \|$", page("guarantees"), re.MULTILINE)

    assert len(rows) > 25
    for hazard, cell in rows:
        named = [re.fullmatch(r"`(tests/[\w/]+\.py)`: (.*)", part) for part in cell.split("; ")]
        assert named, hazard
        assert [part and missing_tests(part[1], part[2]) for part in named] == [[]] * len(named), hazard


def missing_tests(file: str, tests: str) -> list[str]:
    """Of the names in backticks, those that the file does not define."""
    names = re.findall(r"`(\w+)`", tests)
    assert names, file
    source = (REPOSITORY / file).read_text()
    return [name for name in names if f"def {name}(" not in source]


def test_every_setting_has_one_row() -> None:
    before, rules = page("configuration").split("### Rules\n")
    rules, behind = rules.split("### Policy block\n")
    behind, uploads = behind.split("## Upload\n")
    uploads, quotas = uploads.split("## Quotas\n")
    of_rules, of_uploads = row_names(rules), row_names(uploads)
    rows = row_names(before + behind + quotas)

    assert sorted(of_uploads) == sorted(set(of_uploads))

    assert [field for field in RuleSettings.__struct_fields__ if field not in of_rules] == []
    assert len(rows) > 30
    assert sorted(rows) == sorted(set(rows))


def row_names(text: str) -> list[str]:
    """The settings in the first column of tables."""
    columns = re.findall(r"^\| (`[^|]*`)[^|]*\|", text, re.MULTILINE)
    return [name for column in columns for name in re.findall(r"`(\w+)`", column)]


def test_the_migration_page_has_every_call_of_tensor_savers_with_its_parameters() -> None:
    text = page("migration")
    classes = (tensor_saver.TensorSaver, tensor_saver.TensorCollectionState)
    methods = {name for kind in classes for name, value in vars(kind).items() if inspect.isfunction(value)}
    listed = dict(re.findall(r"`(\w+)\(([^`]*)\)`", text))

    called = {name for name in tensor_saver.__all__ if inspect.isfunction(getattr(tensor_saver, name))}
    told_as_a_range = re.compile("[sg]et_(rank|sample_idx|iteration|batch_idx|sequence_idx)")
    named = {name for name in methods if not (name.startswith("_") or told_as_a_range.fullmatch(name))}
    assert [name for name in {*tensor_saver.__all__, *named} if f"`{name}" not in text] == []
    for name in called & listed.keys():
        parameters = inspect.signature(getattr(tensor_saver, name)).parameters.values()
        assert listed[name] == ", ".join(map(shown, parameters)), name


def shown(parameter: inspect.Parameter) -> str:
    default = parameter.default
    text = f'"{default}"' if isinstance(default, str) else str(default)
    return parameter.name if default is inspect.Parameter.empty else f"{parameter.name}={text}"
