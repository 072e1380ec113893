"""Settings of the client: precedence, origins, and bad values that never stop a job."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from capd_client.config.settings import load_config, parse_endpoint
from capd_client.errors import ConfigError
from capd_client.rules.schema import RuleSettings, rule_of_globs


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_anything_capture_is_off_and_every_origin_is_default() -> None:
    config = load_config({})
    assert not config.enabled
    assert (config.policy, config.mode, config.steps, config.exit_timeout_s) == ("drop", "tensor", "0", 30.0)
    assert set(config.origins.values()) == {"default"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"CAPD_ENDPOINT": "off", "TENSOR_SAVE_ENABLED": "true"}, None),
        ({"CAPD_ENDPOINT": "unix:/run/s", "TENSOR_SAVE_ENABLED": "false"}, None),
        ({"CAPD_ENDPOINT": "unix:/run/s", "TENSOR_SAVE_ENABLED": "true"}, "/run/s"),
        ({"CAPD_ENDPOINT": "unix:/run/s"}, "/run/s"),
        ({"TENSOR_SAVE_ENABLED": "true"}, None),
        ({"CAPD_ENDPOINT": ""}, None),
    ],
)
def test_on_and_off_follow_the_documented_order(environ: dict[str, str], expected: str | None) -> None:
    assert load_config(environ).endpoint == expected


@pytest.mark.parametrize("word", ["true", "True", "TRUE", " tRuE ", "1"])
def test_tensor_savers_switch_in_any_case_of_letters_asks_for_a_daemon_of_the_jobs_own(
    word: str, empty_folder: Path
) -> None:
    config = load_config({"TENSOR_SAVE_ENABLED": word})

    assert config.enabled
    assert (config.endpoint, config.embedded) == (None, str(empty_folder / "enhanced_tensor_logs"))
    assert config.origins["embedded"] == "env TENSOR_SAVE_ENABLED"


def test_a_switch_that_says_neither_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config({"TENSOR_SAVE_ENABLED": "maybe", "CAPD_ENDPOINT": "unix:/run/s"})

    assert config.endpoint == "/run/s"
    assert caplog.text.count("TENSOR_SAVE_ENABLED='maybe'") == 1
    assert not load_config({"TENSOR_SAVE_ENABLED": "maybe"}).enabled


@pytest.mark.parametrize("word", ["", "false", "FALSE", "off", "0", "no", "nonsense"])
def test_any_other_word_asks_for_none(word: str) -> None:
    config = load_config({"TENSOR_SAVE_ENABLED": word})

    assert (config.enabled, config.embedded) == (False, None)


@pytest.mark.parametrize(
    ("directories", "expected"),
    [
        ({"TENSOR_SAVE_DIR": "/data/logs"}, "/data/logs"),
        ({"TENSOR_SAVE_DIR": "/data/logs/mxfp8"}, "/data/logs"),
        ({"TENSOR_SAVE_DIR": "/data/logs/HiFP8/"}, "/data/logs"),
        ({"TENSOR_SAVE_DIR": "/data/mxfp8/logs"}, "/data/mxfp8/logs"),
        ({"TENSOR_SAVE_DIR": "/bf16"}, "/"),
        ({"TENSOR_SAVE_DIR": "/data/logs", "CAPD_STORE": "/data/captures/mxfp8"}, "/data/captures/mxfp8"),
    ],
)
def test_a_directory_of_a_quant_type_means_the_one_that_holds_it(
    directories: dict[str, str], expected: str
) -> None:
    assert load_config({"TENSOR_SAVE_ENABLED": "true", **directories}).embedded == expected


def test_a_relative_directory_of_a_quant_type_means_where_the_job_is(empty_folder: Path) -> None:
    config = load_config({"TENSOR_SAVE_ENABLED": "true", "TENSOR_SAVE_DIR": "mxfp4"})

    assert config.embedded == str(empty_folder)


def test_environment_wins_over_file_and_file_over_default(empty_folder: Path) -> None:
    (empty_folder / "capd.toml").write_text(
        'policy = "block"\nquant_type = "mxfp8"\nmax_block_ms = 5\nmax_mb_per_step = 2.5\n'
        'max_d2h_gbps = 12\nslice = "first:64"\n'
        '[when]\nsteps = "0-3"\nranks = 0\n[daemon]\nstore = "x"\n'
    )

    config = load_config({"CAPD_POLICY": "drop", "CAPD_STEPS": "7", "CUSTOM_QUANT_TYPE": "hifp8"})

    assert (config.policy, config.steps, config.quant_type) == ("drop", "7", "hifp8")
    assert (config.max_block_ms, config.max_mb_per_step, config.ranks) == (5.0, 2.5, "0")
    assert (config.slice, config.max_d2h_gbps) == ("first:64", 12.0)
    assert config.origins["policy"] == "env CAPD_POLICY"
    assert config.origins["max_block_ms"] == f"file {empty_folder / 'capd.toml'}"
    assert config.origins["micro_batches"] == "default"


@pytest.mark.parametrize(
    ("text", "every"),
    [("tensor", 1), ("stats", 1), ("sample:1/1", 1), (" Sample:1/8 ", 8), ("sample:1/1000000000", 10**9)],
)
def test_a_mode_says_of_how_many_calls_one_is_kept(text: str, every: int) -> None:
    config = load_config({"CAPD_MODE": text, "CAPD_STRICT": "1"})

    assert (config.mode, config.sample_every) == (text.strip().lower(), every)


@pytest.mark.parametrize(
    ("environ", "waits"),
    [
        ({}, False),
        ({"CAPD_POLICY": "block"}, True),
        ({"CAPD_POLICY": "thin"}, False),
        ({"CAPD_POLICY": "stats"}, False),
        ({"CAPD_POLICY": "block", "CAPD_RING": "drop"}, False),
        ({"CAPD_RING": " Wait "}, True),
    ],
)
def test_the_ring_waits_under_policy_block_unless_the_setting_says_otherwise(
    environ: dict[str, str], waits: bool
) -> None:
    assert load_config(environ | {"CAPD_STRICT": "1"}).ring_waits is waits


def test_tensors_are_held_only_where_it_was_asked_for(empty_folder: Path) -> None:
    assert load_config({}).snapshot == "always"
    assert load_config({"CAPD_SNAPSHOT": "AUTO"}).snapshot == "auto"
    (empty_folder / "capd.toml").write_text('snapshot = "auto"\nring = "wait"\n')
    assert (load_config({}).snapshot, load_config({}).ring) == ("auto", "wait")


def test_own_names_win_over_tensor_savers() -> None:
    config = load_config({"CAPD_QUANT_TYPE": "mxfp4", "CUSTOM_QUANT_TYPE": "hifp8"})
    assert config.quant_type == "mxfp4"


def test_tensor_savers_counters_start_the_count() -> None:
    config = load_config({"TENSOR_SAVER_ITERATION": "12", "CURRENT_SAMPLE_IDX": "3"})
    assert (config.iteration, config.sample_idx) == (12, 3)


def test_a_job_under_slurm_shares_one_run_id_unless_it_names_one() -> None:
    slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2"}
    assert load_config(slurm).run_id == "slurm-77.2"
    assert load_config(slurm | {"CAPD_RUN_ID": "mine"}).run_id == "mine"


@pytest.mark.parametrize(
    ("name", "value", "attribute", "default"),
    [
        ("CAPD_POLICY", "nonsense", "policy", "drop"),
        ("CAPD_MODE", "statistics", "mode", "tensor"),
        ("CAPD_MODE", "sample", "mode", "tensor"),
        ("CAPD_MODE", "sample:1/0", "mode", "tensor"),
        ("CAPD_MODE", "sample:1/03", "mode", "tensor"),
        ("CAPD_MODE", "sample:2/3", "mode", "tensor"),
        ("CAPD_MODE", "sample:1/-3", "mode", "tensor"),
        ("CAPD_MODE", "sample:1/n", "mode", "tensor"),
        ("CAPD_MODE", "sample:1/\u0663", "mode", "tensor"),
        ("CAPD_MODE", "sample:1/1000000001", "mode", "tensor"),
        ("CAPD_MODE", "sample:1/99999999999", "mode", "tensor"),
        ("CAPD_SLICE", "last:3", "slice", None),
        ("CAPD_SLICE", "first:0", "slice", None),
        ("CAPD_STEPS", "3-1", "steps", "0"),
        ("CAPD_MAX_BLOCK_MS", "-1", "max_block_ms", 30_000.0),
        ("CAPD_MAX_BLOCK_MS", "nan", "max_block_ms", 30_000.0),
        ("CAPD_ARENA_BYTES", "lots", "arena_bytes", None),
        ("CAPD_MAX_MB_PER_STEP", "0", "max_mb_per_step", None),
        ("CAPD_MAX_D2H_GBPS", "0", "max_d2h_gbps", None),
        ("CAPD_MAX_MB_PER_STEP", "20 bananas", "max_mb_per_step", None),
        ("CAPD_MAX_D2H_GBPS", "nan", "max_d2h_gbps", None),
        ("CAPD_ARENA_BYTES", "3", "arena_bytes", None),
        ("CAPD_ARENA_BYTES", "10%", "arena_bytes", None),
        ("CAPD_ARENA_BYTES", "2G", "arena_bytes", None),
        ("CAPD_RING_BYTES", "lots", "ring_bytes", None),
        ("CAPD_RING_BYTES", "10%", "ring_bytes", None),
        ("CAPD_RING_BYTES", "-1", "ring_bytes", None),
        ("CAPD_RING_BYTES", "4096", "ring_bytes", None),
        ("CAPD_PIECE_BYTES", "1000000", "piece_bytes", None),
        ("CAPD_PIECE_BYTES", "2GiB", "piece_bytes", None),
        ("CAPD_SNAPSHOT", "never", "snapshot", "always"),
        ("CAPD_RING", "block", "ring", None),
        ("CAPD_EXIT_TIMEOUT_S", "inf", "exit_timeout_s", 30.0),
        ("CAPD_LOG", "LOUD", "log", None),
        ("TENSOR_SAVER_ITERATION", "-4", "iteration", 0),
        ("CAPD_RUN_ID", "x" * 200, "run_id", None),
        ("CAPD_ENDPOINT", "tcp://host:1", "endpoint", None),
    ],
)
def test_a_bad_value_is_one_warning_and_the_default_or_an_error_when_strict(
    name: str, value: str, attribute: str, default: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = load_config({name: value})

    assert getattr(config, attribute) == default
    assert len(caplog.records) == 1
    assert name in caplog.text
    with pytest.raises(ConfigError, match=name):
        load_config({name: value, "CAPD_STRICT": "1"})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("arena_bytes", "2GB", 2 * 10**9),
        ("arena_bytes", "512MiB", 512 << 20),
        ("arena_bytes", "1048576", 1 << 20),
        ("ring_bytes", "1GB", 10**9),
        ("ring_bytes", "65536", 1 << 16),
        ("piece_bytes", "16MiB", 16 << 20),
        ("piece_bytes", "1GiB", 1 << 30),
        ("max_mb_per_step", "2GB", 2000.0),
        ("max_mb_per_step", "0.5", 0.5),
        ("max_d2h_gbps", "800MB", 0.8),
        ("max_d2h_gbps", "12", 12.0),
    ],
)
def test_sizes_take_units_in_the_environment_and_in_the_file(
    name: str, text: str, value: float, tmp_path: Path
) -> None:
    file = tmp_path / "capd.toml"
    file.write_text(f'{name} = "{text}"\n')

    assert getattr(load_config({f"CAPD_{name.upper()}": text, "CAPD_STRICT": "1"}), name) == value
    assert getattr(load_config({"CAPD_CONFIG": str(file), "CAPD_STRICT": "1"}), name) == value


@pytest.mark.parametrize(
    "name", ["arena_bytes", "ring_bytes", "piece_bytes", "max_mb_per_step", "max_d2h_gbps"]
)
def test_what_is_no_size_is_told_with_setting_value_and_what_is_accepted(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({f"CAPD_{name.upper()}": "2 bananas", "CAPD_STRICT": "1"})

    assert all(part in str(error.value) for part in (f"CAPD_{name.upper()}", "'2 bananas'", "2GB, 512MiB"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('polici = "drop"\n', "policy"),
        ('[when]\nstep = "0"\n', "when.steps"),
        ("policy = [1]\n", "policy"),
        ("= broken", "not valid TOML"),
        ("x = '\xff'", "not valid TOML"),
        ("max_block_ms = " + "9" * 5000, "not valid TOML"),
        ("max_block_ms = 1" + "0" * 400, "max_block_ms"),
        ("[when]\nsteps = 0x" + "f" * 9000, "when.steps"),
        ("x = " + "[" * 100_000, "not valid TOML"),
        ("[[rule]]\nstpes = 1", "unknown setting stpes in rule '1'; did you mean steps?"),
        ("[[rule]]\nname = 'mlp'\ninclude = '('", "rule 'mlp': '(' is not a regular expression"),
        ("[rule]\nname = 'mlp'", "Expected `array`, got `object` - at `$.rule`"),
        ("[[rule]]\ntensors = 3", "$.rule[0].tensors"),
        ("[[rule]]\nname = 'a'\n[[rule]]\nname = 'a'", "two rules are called 'a'"),
    ],
)
def test_a_bad_file_is_refused_with_a_reason_and_the_job_goes_on(
    empty_folder: Path, text: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = empty_folder / "other.toml"
    path.write_bytes(text.encode("latin-1"))

    config = load_config({"CAPD_CONFIG": str(path)})

    assert config.policy == "drop"
    assert said in caplog.text
    assert str(path) in caplog.text


def test_a_named_file_that_is_missing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    load_config({"CAPD_CONFIG": "/nowhere/capd.toml"})
    assert "/nowhere/capd.toml" in caplog.text


@pytest.mark.parametrize("text", ["", "unix:", "/run/s", "tcp:x", "unix:/" + "a" * 107])
def test_an_endpoint_that_cannot_be_connected_to_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_endpoint(text)


def test_the_longest_socket_path_is_taken_and_one_byte_more_names_the_limit() -> None:
    path = "/" + "a" * 106
    assert parse_endpoint("unix:" + path) == path
    with pytest.raises(ConfigError, match="107"):
        parse_endpoint("unix:" + path + "a")


RULES = """
policy = "block"
[when]
steps = "0-9"
[[rule]]
name = "attention"
components = "FA"
[[rule]]
include = ['mlp\\.up', "down"]
store = "stats"
steps = 3
"""


def test_rules_come_from_the_file_with_names_of_their_own(empty_folder: Path) -> None:
    (empty_folder / "capd.toml").write_text(RULES)

    config = load_config({"CAPD_STRICT": "1"})

    assert [rule.name for rule in config.rules] == ["attention", "2"]
    assert config.rules[1] == RuleSettings(name="2", include=["mlp\\.up", "down"], store="stats", steps=3)
    assert config.origins["rules"] == f"file {empty_folder / 'capd.toml'}"


def test_the_environment_replaces_them_by_globs_or_by_those_of_another_file(empty_folder: Path) -> None:
    (empty_folder / "capd.toml").write_text(RULES)
    (empty_folder / "other.toml").write_text('[[rule]]\nlayers = "0-3"\n')

    globs = load_config({"CAPD_STRICT": "1", "CAPD_SELECT": "*.mlp.*, lm_head"})
    other = load_config({"CAPD_STRICT": "1", "CAPD_SELECT": "other.toml"})

    assert (globs.rules, globs.origins["rules"]) == (
        (rule_of_globs(["*.mlp.*", "lm_head"]),),
        "env CAPD_SELECT",
    )
    assert (other.rules, other.steps) == ((RuleSettings(name="1", layers="0-3"),), "0-9")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "other.toml does not exist"),
        ("[when]\nsteps = 1", "unknown setting when in a file of rules alone"),
        ("", "it has no [[rule]]"),
        ("rule = [3]", "Expected `object`, got `int`"),
        ("[[rule]]\nlayers = 'x'", "rule '1': layers: cannot read 'x' as a range"),
    ],
)
def test_a_file_of_rules_that_cannot_be_used_leaves_those_of_capd_toml(
    empty_folder: Path, text: str | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    (empty_folder / "capd.toml").write_text(RULES)
    if text is not None:
        (empty_folder / "other.toml").write_text(text)

    config = load_config({"CAPD_SELECT": "other.toml"})

    assert [rule.name for rule in config.rules] == ["attention", "2"]
    assert said in caplog.text
    assert "rules (env CAPD_SELECT)" in caplog.text


@pytest.mark.parametrize("text", ["none", " OFF ", "bf16", '{"linear": "none"}', ""])
def test_a_recipe_that_changes_nothing_is_none(text: str) -> None:
    assert load_config({"CAPD_EMULATE": text, "CAPD_STRICT": "1"}).emulate is None


def test_a_recipe_is_a_word_or_json_and_the_same_text_for_both() -> None:
    word = load_config({"CAPD_EMULATE": " mxfp8 "})
    assert word.emulate is not None
    again = load_config({"CAPD_EMULATE": word.emulate})

    assert again.emulate == word.emulate
    assert json.loads(word.emulate)["linear"]["format"] == "mxfp8"
    assert word.origins["emulate"] == "env CAPD_EMULATE"
    assert load_config({"CUSTOM_QUANT_TYPE": "mxfp8", "CAPD_QUANT_TYPE": "mxfp8"}).emulate is None


def test_a_recipe_that_cannot_be_read_emulates_nothing_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert load_config({"CAPD_EMULATE": "mxfp9"}).emulate is None
    assert "emulate (env CAPD_EMULATE)" in caplog.text
    assert "mxfp9" in caplog.text
    with pytest.raises(ConfigError, match="mxfp9"):
        load_config({"CAPD_EMULATE": "mxfp9", "CAPD_STRICT": "1"})


@pytest.mark.parametrize(
    ("text", "watch"), [("auto", "auto"), ("1", "auto"), ("Yes", "auto"), ("0", "off"), ("OFF", "off")]
)
def test_watching_is_said_in_the_words_of_a_switch_too(text: str, watch: str, empty_folder: Path) -> None:
    assert load_config({"CAPD_WATCH": text}).watch == watch
    with pytest.raises(ConfigError, match="supported: auto, off, 1, 0"):
        load_config({"CAPD_WATCH": f"{text}?", "CAPD_STRICT": "1"})
