"""Settings of the daemon: order of origins, and messages that name what is wrong and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from capd.config import (
    DaemonSettings,
    load_daemon_settings,
    load_retention,
    load_triggers,
    misspelt_variables,
    read_file,
    resolve_daemon,
)
from capd.errors import ConfigError
from capd.lifecycle.policy import Policy
from capd_client.config.file import parse_settings, read_toml


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "capd.toml") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def test_without_any_source_the_defaults_hold() -> None:
    found = resolve_daemon({}, {})

    assert found.settings == DaemonSettings()
    assert set(found.origins.values()) == {"default"}
    assert found.path is None


def test_flag_beats_environment_beats_file_beats_default() -> None:
    write('[daemon]\ncodec = "fast"\nthreads = 2\nstore = "from-file"\n')
    environ = {"CAPD_THREADS": "3", "CAPD_STORE": "from-env"}

    found = resolve_daemon({"store": Path("from-flag"), "threads": None}, environ)

    assert (found.settings.store, found.origins["store"]) == (Path("from-flag"), "flag")
    assert (found.settings.threads, found.origins["threads"]) == (3, "env CAPD_THREADS")
    assert (found.settings.codec, found.origins["codec"]) == ("fast", "file capd.toml")
    assert found.origins["durability"] == "default"


def test_the_named_file_beats_the_one_in_the_working_directory() -> None:
    write("[daemon]\nthreads = 1\n")
    other = write("[daemon]\nthreads = 2\n", "other.toml")
    third = write("[daemon]\nthreads = 3\n", "third.toml")

    assert load_daemon_settings({}, {}).threads == 1
    assert load_daemon_settings({}, {"CAPD_CONFIG": str(other)}).threads == 2
    assert load_daemon_settings({}, {"CAPD_CONFIG": str(other)}, third).threads == 3


def test_tensor_savers_directory_variable_is_read_after_capds_own() -> None:
    old = {"TENSOR_SAVE_DIR": "/old"}

    assert load_daemon_settings({}, old).store == Path("/old")
    assert load_daemon_settings({}, {"TENSOR_SAVE_DIR": "/old/mxfp8"}).store == Path("/old")
    assert load_daemon_settings({}, {**old, "CAPD_STORE": "/new"}).store == Path("/new")


def test_endpoint_off_speaks_to_the_job_not_to_the_daemon() -> None:
    assert load_daemon_settings({}, {"CAPD_ENDPOINT": "off"}).endpoint is None
    assert load_daemon_settings({}, {"CAPD_ENDPOINT": "unix:/x/y"}).endpoint == "unix:/x/y"


def test_every_field_is_reachable_from_environment_and_file() -> None:
    values = {
        "store": "/s", "endpoint": "unix:/e", "run_id": "r", "node": "n", "threads": "4", "staging_bytes": "64MiB",
        "max_disk": "5GB", "keep_free": "20%", "allow_uid": "7,8", "durability": "durable", "codec": "fast",
        "statistics": "false", "idle_seal_s": "2.5", "shutdown_timeout_s": "9", "run_max": "3GB", "rank_max": "2GB",
        "series_max": "1GB", "quota_policy": "drop", "metrics": "127.0.0.1:9464",
        "metrics_token_file": "/t", "metrics_file": "/m.prom", "metrics_ranks": "true", "log_format": "json",
        "upload_to": "s3://bucket/captures", "upload_runs": "exp*", "upload_threads": "3",
        "upload_bandwidth": "10MB", "upload_live_bandwidth": "5MB",
        "upload_delete_local": "after:2h", "upload_drain_s": "60",
        "lab_formats": "mxfp8, nvfp4:16x16", "lab_sample": "1/16", "lab_cpu": "35%",
        "window_iterations": "4", "window_bytes": "2GiB", "window_memory": "256MiB", "window_directory": "/w",
        "window_post": "2", "window_statistics": "true",
    }  # fmt: skip
    expected = DaemonSettings(
        store=Path("/s"), endpoint="unix:/e", run_id="r", node="n", threads=4, staging_bytes=64 << 20,
        max_disk=5 * 10**9, keep_free=0.2, allow_uid=(7, 8), durability="durable", codec="fast", statistics=False,
        idle_seal_s=2.5, shutdown_timeout_s=9, run_max=3 * 10**9, rank_max=2 * 10**9, series_max=10**9,
        quota_policy="drop", metrics="127.0.0.1:9464", metrics_token_file=Path("/t"),
        metrics_file=Path("/m.prom"), metrics_ranks=True, log_format="json",
        upload_to="s3://bucket/captures", upload_runs="exp*", upload_threads=3, upload_bandwidth=10**7,
        upload_live_bandwidth=5 * 10**6,
        upload_delete_local="after:2h", upload_drain_s=60,
        lab_formats=("mxfp8", "nvfp4:16x16"), lab_sample="1/16", lab_cpu=0.35,
        window_iterations=4, window_bytes=2 << 30, window_memory=256 << 20, window_directory=Path("/w"),
        window_post=2, window_statistics=True,
    )  # fmt: skip
    quota = {
        "run_max": "run_max",
        "rank_max": "rank_max",
        "series_max": "series_max",
        "quota_policy": "policy",
    }
    prefixed = {
        table: {name: key for name in values if (key := name.removeprefix(f"{table}_")) != name}
        for table in ("upload", "lab", "window")
    }
    table = "\n".join(
        f'{name} = "{value}"'
        for name, value in values.items()
        if name not in ("allow_uid", *quota, *(name for keys in prefixed.values() for name in keys))
    )
    limits = "\n".join(f'{key} = "{values[name]}"' for name, key in quota.items())
    tables = "\n".join(
        f"[{table}]\n" + "\n".join(f'{key} = "{values[name]}"' for name, key in keys.items())
        for table, keys in prefixed.items()
    )
    write(f"[daemon]\nallow_uid = [7, 8]\n{table}\n[quota]\n{limits}\n{tables}\n", "all.toml")

    assert set(values) == set(DaemonSettings.model_fields)
    assert (
        load_daemon_settings({}, {f"CAPD_{name.upper()}": value for name, value in values.items()})
        == expected
    )
    assert load_daemon_settings({}, {}, Path("all.toml")) == expected
    assert load_daemon_settings(expected.model_dump(), {}) == expected


@pytest.mark.parametrize(
    ("toml", "pieces"),
    [
        ("[daemon]\nmax_dsk = 1\n", ["capd.toml", "[daemon]", "max_dsk", "max_disk"]),
        ("[daemon]\nrun_max = 1\n", ["capd.toml", "[daemon] run_max", "belongs into [quota]"]),
        ("[quota]\nrun_mx = 1\n", ["capd.toml", "[quota] run_mx", "unknown key", "run_max"]),
        ('[quota]\nrun_max = "much"\n', ["capd.toml", "[quota] run_max", "much"]),
        ('polcy = "drop"\n', ["capd.toml", "polcy", "policy"]),
        ("[when]\nstep = 1\n", ["capd.toml", "step", "steps"]),
        ('[daemon]\ncodec = "zip"\n', ["capd.toml", "codec", "default", "fast", "zip"]),
        ('[daemon]\nstaging_bytes = "10%"\n', ["capd.toml", "staging_bytes", "512MiB"]),
        ("[daemon]\nthreads = 0\n", ["capd.toml", "threads", "0"]),
        ('[daemon]\nnode = "a/b"\n', ["capd.toml", "node", "a/b"]),
        ("daemon = 3\n", ["capd.toml", "daemon"]),
        ("[daemon\n", ["capd.toml", "TOML"]),
    ],
)
def test_a_bad_file_is_refused_naming_file_key_and_remedy(toml: str, pieces: list[str]) -> None:
    write(toml)

    with pytest.raises(ConfigError) as caught:
        load_daemon_settings({}, {})

    assert all(piece in str(caught.value) for piece in pieces), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_value_is_blamed_on_its_origin() -> None:
    with pytest.raises(ConfigError, match=r"max_disk \(env CAPD_MAX_DISK\): '20 bananas'"):
        load_daemon_settings({}, {"CAPD_MAX_DISK": "20 bananas"})
    with pytest.raises(ConfigError, match=r"--idle-seal-s: .*-1"):
        load_daemon_settings({"idle_seal_s": -1.0}, {})
    with pytest.raises(ConfigError, match=r"endpoint \(env CAPD_ENDPOINT\): .*unix:/path"):
        load_daemon_settings({}, {"CAPD_ENDPOINT": "tcp:1.2.3.4:5"})


def test_several_bad_values_are_counted() -> None:
    with pytest.raises(ConfigError, match=r"and 1 more"):
        load_daemon_settings({"threads": 0, "codec": "zip"}, {})


def test_a_missing_file_is_an_error_only_when_it_was_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml does not exist"):
        load_daemon_settings({}, {}, Path("nowhere.toml"))
    with pytest.raises(ConfigError, match=r"nowhere\.toml does not exist"):
        load_daemon_settings({}, {"CAPD_CONFIG": "nowhere.toml"})


def test_variables_that_are_nearly_a_setting_are_named() -> None:
    environ = {"CAPD_SLICES": "first:1", "CAPD_MAX_DISC": "1GB", "CAPD_MODE": "stats", "CAPD_FIGURES": "x"}

    assert misspelt_variables(environ) == [
        "CAPD_MAX_DISC is not a setting and has no effect; did you mean CAPD_MAX_DISK?",
        "CAPD_SLICES is not a setting and has no effect; did you mean CAPD_SLICE?",
    ]


def test_retention_is_read_from_the_file_alone_and_is_empty_without_it(tmp_path: Path) -> None:
    file = tmp_path / "with.toml"
    file.write_text(
        '[retention]\nkeep_last = 2\nkeep_within = "30d"\nmax_size = "2TB"\nkeep_tags = ["paper"]\n'
    )

    assert not load_retention({}).policy(DaemonSettings())
    policy = load_retention({"CAPD_KEEP_LAST": "9"}, file).policy(DaemonSettings())
    assert policy == Policy(2, 30 * 86_400.0, 2 * 10**12, ("paper",))
    # The job reads the same file.
    assert parse_settings(read_toml(str(file))) == {}


def test_what_is_not_uploaded_stays_where_runs_are_uploaded(tmp_path: Path) -> None:
    file = tmp_path / "with.toml"
    uploads = DaemonSettings(upload_to="s3://bucket/captures", store=tmp_path, upload_runs="exp*")
    for line, plain, beside in (("", False, True), ("only_uploaded = true\n", True, True),
                                ("only_uploaded = false\n", False, False)):  # fmt: skip
        file.write_text(f"[retention]\nkeep_last = 2\n{line}")
        found = load_retention({}, file)
        assert found.policy(DaemonSettings()) == Policy(2, only_uploaded=plain)
        assert found.policy(uploads) == Policy(2, only_uploaded=beside)
    file.write_text("[retention]\nonly_uploaded = true\n")
    assert not load_retention({}, file).policy(uploads)
    assert uploads.uploads(tmp_path / "exp7.zarr")
    assert not uploads.uploads(tmp_path / "other.zarr")
    assert not uploads.uploads(tmp_path / "elsewhere" / "exp7.zarr")


@pytest.mark.parametrize(
    ("text", "after_s", "at"),
    [
        ("never", None, None),
        ("after:1h", 3600.0, None),
        ("after:30d", 30 * 86_400.0, None),
        ("at:85%", None, 0.85),
    ],
)
def test_delete_local_becomes_a_policy(text: str, after_s: float | None, at: float | None) -> None:
    found = DaemonSettings(upload_delete_local=text).move_policy
    assert (found.after_s, found.at, bool(found)) == (after_s, at, text != "never")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("only_uploaded = 1", "[retention] only_uploaded: "),
        ("keep_lasst = 2", "[retention] keep_lasst: unknown key; did you mean 'keep_last'?"),
        ("keep_last = 0", "[retention] keep_last: "),
        ("keep_last = true", "[retention] keep_last: "),
        ('keep_within = "soon"', "[retention] keep_within: 'soon' is not an age"),
        ('max_size = "2G"', "[retention] max_size: '2G' is not a size"),
    ],
)
def test_a_wrong_retention_is_named_with_its_remedy(line: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "capd.toml"
    file.write_text(f"[retention]\n{line}\n")

    with pytest.raises(ConfigError) as refused:
        load_retention({}, file)
    assert str(refused.value).startswith(f"{file}: {says}")
    assert len(read_file(file)[1]) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('to = "s4://b/x"', "is no address of an object store"),
        ('to = "s3://bucket/run.zarr"', "is the address of a run"),
        ('delete_local = "at:0%"', "is none of never, after:TIME such as after:1h, and at:PERCENT"),
        ('delete_local = "after:soon"', "is not an age"),
        ('bandwidth = "12"', "greater than or equal to 1024"),
        (
            'where = "s3://b/x"',
            "unknown key; known keys: to, runs, threads, bandwidth, live_bandwidth, delete_local, drain_s",
        ),
    ],
)
def test_a_wrong_key_of_uploads_names_its_place(text: str, said: str) -> None:
    _, problems = read_file(write(f"[upload]\n{text}\n"))

    assert len(problems) == 1
    assert problems[0].startswith("capd.toml: [upload] ")
    assert said in problems[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('formats = ["mxfp8", "mxfp9"]', "unknown format 'mxfp9'; known: bf16, fp16, fp8, mxfp8"),
        ('formats = ["nvfp4:e5m2"]', "nvfp4 has no option 'e5m2'; known: e2m1"),
        ("formats = 3", 'write a list of formats, such as ["mxfp8", "nvfp4:16x16"]'),
        (f"formats = {[f'mxfp8:axis=-{n}' for n in range(1, 18)]}", "17 formats are more than the 16"),
        ('sample = "0"', "'0' is no sample; write 1/N"),
        ('sample = "1/0"', "'1/0' is no sample; write 1/N"),
        ('sample = "2/3"', "'2/3' is no sample; write 1/N"),
        ('cpu = "101%"', "a share of one CPU is from 0.1% to 100%, got '101%'"),
        ("cpu = 0", "a share of one CPU is from 0.1% to 100%"),
        ('cpu = "much"', "'much' is no share of a CPU; write a percentage, such as 20%"),
        ('format = "mxfp8"', "unknown key; known keys: formats, sample, cpu"),
    ],
)
def test_a_wrong_key_of_the_lab_names_its_place(text: str, said: str) -> None:
    _, problems = read_file(write(f"[lab]\n{text}\n"))

    assert len(problems) == 1
    assert problems[0].startswith("capd.toml: [lab] ")
    assert said in problems[0]
    assert "\n" not in problems[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("iterations = 0", "iterations: Input should be greater than or equal to 1, got 0"),
        ("iterations = 10001", "iterations: Input should be less than or equal to 10000"),
        ('iterations = 3\nbytes = "1KiB"', "bytes: Input should be greater than or equal to 1048576"),
        ('iterations = 3\nbytes = "much"', "bytes: 'much' is not a size"),
        (
            'iterations = 3\nbytes = "1GiB"\nmemory = "2GiB"',
            "memory: 2147483648 bytes are more than the 1073741824 of bytes; lower memory, or raise bytes",
        ),
        ("iterations = 3\npost = -1", "post: Input should be greater than or equal to 0"),
        ("iteration = 3", "iteration: unknown key; known keys: iterations, bytes, memory, directory, post"),
    ],
)
def test_a_wrong_key_of_the_window_names_what_is_allowed(text: str, said: str) -> None:
    _, problems = read_file(write(f"[window]\n{text}\n"))

    assert len(problems) == 1
    assert problems[0].startswith(f"capd.toml: [window] {said}")
    assert "\n" not in problems[0]


@pytest.mark.parametrize("text", ['bytes = "1GiB"', "statistics = true"])
def test_a_window_may_have_its_iterations_from_a_variable_and_needs_them(text: str) -> None:
    file = write(f"[window]\n{text}\n")

    found = load_daemon_settings({}, {"CAPD_WINDOW_ITERATIONS": "7"}).window
    assert found is not None
    assert found.iterations == 7
    with pytest.raises(ConfigError) as caught:
        load_daemon_settings({}, {})

    name = text.split(" ")[0]
    assert str(caught.value).startswith(
        f"window_{name} (file {file.name}): it needs iterations, the number of"
    )
    assert "\n" not in str(caught.value)


def test_a_window_is_the_settings_of_the_recorder() -> None:
    assert load_daemon_settings({}, {}).window is None
    write('[window]\niterations = 5\nbytes = "1GiB"\ndirectory = "spool"\n')

    found = load_daemon_settings({}, {}).window

    assert found is not None
    assert (found.iterations, found.nbytes, found.post_iterations) == (5, 1 << 30, 5)
    assert found.directory == Path("spool").absolute()
    again = load_daemon_settings({}, {"CAPD_WINDOW_POST": "0"}).window
    assert again is not None
    assert again.post_iterations == 0


def test_a_rule_that_keeps_needs_a_window() -> None:
    rule = '[[trigger]]\nname = "nan"\nmetric = "nan"\nabove = 0\naction = "keep"\n'
    write(rule)
    with pytest.raises(ConfigError, match=r'"keep" needs \[window\]'):
        load_triggers({})

    write("[window]\niterations = 3\n" + rule)

    assert [one.action for one in load_triggers({})] == ["keep"]


def test_a_list_of_formats_is_that_of_the_environment() -> None:
    write('[lab]\nformats = ["mxfp8", "nvfp4:16x16"]\ncpu = 0.5\n')

    assert load_daemon_settings({}, {}).lab_formats == ("mxfp8", "nvfp4:16x16")
    assert load_daemon_settings({}, {}).lab_cpu == 0.5
    found = load_daemon_settings({}, {"CAPD_LAB_FORMATS": "hifp8,hifp8"})
    assert (found.lab_formats, found.lab_sample) == (("hifp8",), "1/8")


@pytest.mark.parametrize(
    "address", ["s3://AKIA123:hidden-word@bucket/x", "s3://bucket/x?X-Amz-Signature=hidden-word"]
)
def test_keys_in_an_address_are_refused_and_never_repeated(address: str) -> None:
    with pytest.raises(ConfigError, match="an address has no keys and no query") as raised:
        load_daemon_settings({}, {"CAPD_UPLOAD_TO": address})

    assert "hidden-word" not in str(raised.value)
