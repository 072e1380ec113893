"""The arithmetic of plans: from what ranks saw to rates, rooms and warnings; and how it is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from capd_client.config.settings import load_config
from capd_client.errors import ConfigError
from capd_client.planning.disk import disk_settings
from capd_client.planning.figures import rank_plan
from capd_client.planning.seen import Calls, IterationSeen, RankSeen, SeriesSeen
from capd_client.planning.session import PlanSession
from capd_client.planning.text import plan_lines
from capd_client.planning.whole import whole_plan
from capd_client.protocol.key import Key

MB = 10**6


def one_series(
    module: str = "layers.0.fc", tensor: str = "input", nbytes: int = MB, **changes: Any
) -> SeriesSeen:
    layer = int(module.split(".")[1]) if module.startswith("layers.") else None
    key = Key(
        quant_type="fp32",
        rank=changes.pop("rank", 0),
        tensor_name=tensor,
        module=module,
        layer=layer,
        component="linear",
    )
    calls = [Calls(micro_batch, (nbytes // 4,), nbytes, 1) for micro_batch in (0, 1)]
    values: dict[str, Any] = {
        "key": key, "dtype": "float32", "payload": True, "device": "cpu", "steps": "0-2,100-:100", "once": False,
        "iterations": {0: calls, 1: calls},
    }  # fmt: skip
    return SeriesSeen(**{**values, **changes})


def seen(series: list[SeriesSeen], **changes: Any) -> RankSeen:
    values: dict[str, Any] = {
        "rank": 0, "world_size": 1, "local_world_size": 1, "host": "a", "pid": 1, "state": "complete",
        "iterations": [IterationSeen(0, 8.0), IterationSeen(1, 0.5), IterationSeen(2, 0.5)], "series": series,
        "refused": {}, "sample_every": 1, "policy": "block", "max_step_nbytes": None, "arena_nbytes": 8 * MB,
        "ring_nbytes": None, "link_bytes_per_s": 1e9, "link_how": "test",
    }  # fmt: skip
    return RankSeen(**{**values, **changes})


def plan(*ranks: RankSeen, room: int = 10**12, speed: float = 1e12) -> dict[str, Any]:
    disk = {
        "store": "/s",
        "free_bytes": 2 * room,
        "max_disk": room,
        "keep_free": 0,
        "write_bytes_per_s": speed,
    }
    return whole_plan(ranks, host="a", disk=disk, ended=False)


def test_rates_follow_from_the_selection_and_the_median_step() -> None:
    found = rank_plan(seen([one_series()]), ended=False)

    assert (found["records"], found["bytes"], found["step_s"]) == (2, 2 * MB, 0.5)
    assert found["steps_per_1000"] == 3 + 9
    assert found["bytes_per_1000_steps"] == 12 * 2 * MB
    assert found["bytes_per_hour"] == 12 * 2 * MB * 3600 / 500
    assert found["bytes_in_all"] is None
    assert found["link_s"] == 2e-3
    assert found["arena_steps"] == 4


@pytest.mark.parametrize(
    ("asked", "expected", "said"), [({}, 10**9, 0), ({"CAPD_RING_BYTES": "30GB"}, 25 * 10**9, 1)]
)
def test_the_ring_of_a_plan_is_the_one_that_a_session_would_take(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: dict[str, str],
    expected: int,
    said: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 60 * 10**9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20 * 10**9)
    sink = PlanSession(load_config({**asked, "CAPD_STRICT": "1"}))
    for _ in range(2):
        sink.prepare([torch.device("cpu"), torch.device("cuda", 0)])

    assert sink._ring_nbytes == expected // 4096 * 4096
    assert caplog.text.count("a ring of 30000000000 bytes takes more than half") == said


def test_a_selection_that_ends_has_a_whole_and_one_that_begins_late_a_window_there() -> None:
    ends = rank_plan(seen([one_series(steps="0,7")]), ended=False)
    late = rank_plan(seen([one_series(steps="5000-:10")]), ended=False)

    assert (ends["bytes_in_all"], ends["bytes_per_hour"]) == (2 * 2 * MB, None)
    assert late["steps_per_1000"] == 100


def test_a_job_that_resumes_captures_only_what_lies_before_it() -> None:
    iterations = [IterationSeen(1000, 1.0), IterationSeen(1001, 1.0)]
    calls = {1000: [Calls(0, (1,), 4, 1)]}

    behind = plan(seen([one_series(steps="0", iterations=calls)], iterations=iterations))
    before = plan(seen([one_series(steps="0-:300", iterations=calls)], iterations=iterations))

    (warning,) = behind["warnings"]
    assert warning.partition(",")[0] == 'steps "0" are before the first iteration of the job'
    assert (behind["ranks"][0]["bytes_in_all"], behind["ranks"][0]["bytes"]) == (0, 4)
    assert before["warnings"] == []
    assert before["ranks"][0]["steps_per_1000"] == 4  # 1200, 1500, 1800, 2100


def test_own_captures_count_at_the_rate_at_which_they_were_seen() -> None:
    own = one_series(module="", tensor="loss", steps=None, iterations={0: [Calls(0, (), 4, 1)]})

    found = rank_plan(seen([own], iterations=[IterationSeen(0, 1.0), IterationSeen(1, 1.0)]), ended=False)

    assert found["bytes_per_1000_steps"] == 4 * 500
    assert found["steps"] == []


@pytest.mark.parametrize(("every", "records", "weights"), [(1, 2, 1), (2, 1, 1), (4, 0.5, 0.5)])
def test_sampling_keeps_the_calls_that_the_rule_names(every: int, records: float, weights: float) -> None:
    def calls(number: int) -> list[Calls]:
        return [Calls(ordinal, (1,), 4, 1) for ordinal in range(number)]

    weight = one_series(tensor="weight", once=True, iterations={0: calls(2 if every > 1 else 1)}, steps="all")
    x = one_series(iterations={0: calls(2)}, steps="all")

    found = rank_plan(seen([x, weight], sample_every=every, iterations=[IterationSeen(0, 1.0)]), ended=False)

    assert [one["records"] for one in found["series"]] == [records, weights]


def test_an_iteration_that_was_not_over_counts_only_where_there_is_no_other() -> None:
    both = rank_plan(seen([one_series()], iterations=[IterationSeen(0, 1.0), IterationSeen(1)]), ended=False)
    only = rank_plan(seen([one_series()], iterations=[IterationSeen(0)]), ended=False)
    ended = rank_plan(seen([one_series()], iterations=[IterationSeen(0)]), ended=True)

    assert (both["complete"], [i["iteration"] for i in both["iterations"]]) == (True, [0])
    assert (only["complete"], only["bytes"], only["bytes_per_hour"]) == (False, 2 * MB, None)
    assert ended["complete"]


def test_nodes_add_up_their_ranks_and_other_nodes_disks_are_unknown() -> None:
    ranks = [seen([one_series(rank=r)], rank=r, host="ab"[r // 2], world_size=4) for r in range(4)]

    found = plan(*ranks, room=96 * MB)

    assert [(node["host"], node["ranks"], node["bytes"]) for node in found["nodes"]] == [
        ("a", [0, 1], 4 * MB), ("b", [2, 3], 4 * MB),
    ]  # fmt: skip
    assert found["nodes"][0]["hours_until_full"] == pytest.approx(96 / (2 * 24 * 7.2))
    assert found["nodes"][1]["disk"] is None
    assert found["world_size"] == 4


def test_statistics_weigh_their_row_on_the_disk_and_on_a_gpus_link() -> None:
    cpu = one_series(payload=False)
    cuda = one_series(payload=False, device="cuda:0")

    found = rank_plan(seen([cpu, cuda]), ended=False)

    assert [(one["bytes"], one["link_bytes"]) for one in found["series"]] == [(4272, 2 * MB), (4272, 4272)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"link_bytes_per_s": 1e6}, ["link", "--slice"]),
        ({"policy": "drop", "arena_nbytes": MB // 2}, ["largest tensor", "CAPD_ARENA_BYTES"]),
        ({"policy": "drop", "arena_nbytes": MB + MB // 2}, ["captured step of a rank", "CAPD_ARENA_BYTES"]),
        ({"max_step_nbytes": MB}, ["step_budget", "CAPD_MAX_MB_PER_STEP"]),
        ({"refused": {"unsupported": 3}}, ["unsupported", "3 captures"]),
    ],
)
def test_what_is_too_much_for_a_rank_names_the_setting(changes: dict[str, Any], words: list[str]) -> None:
    assert plan(seen([one_series()]))["warnings"] == []

    warnings = plan(seen([one_series()], **changes))["warnings"]

    assert any(all(word in line for word in words) for line in warnings), warnings


def test_what_is_too_much_for_the_disk_names_the_setting() -> None:
    [slow] = plan(seen([one_series(steps="all")]), speed=1e6)["warnings"]
    [full] = plan(seen([one_series()]), room=MB)["warnings"]

    assert "its disk writes" in slow
    assert "CAPD_MAX_DISK" in full


def test_layers_and_experts_are_grouped_and_other_numbers_are_not() -> None:
    experts = [
        one_series(f"layers.{layer}.experts.{e}.w1", nbytes=4 * (1 + e))
        for layer in range(2)
        for e in range(3)
    ]
    stages = [one_series(f"layers.{layer}.mlp.{i}", nbytes=8) for layer in range(2) for i in (0, 2)]

    lines = list(plan_lines(plan(seen([*experts, *stages]))))
    every = list(plan_lines(plan(seen([*experts, *stages])), every_series=True))

    rows = [line.split() for line in lines if line.startswith("layers")]
    assert [(row[0], row[2], row[4]) for row in rows] == [
        ("layers.*.experts.*.w1", "6", "[1-3]"), ("layers.*.mlp.0", "2", "[2]"), ("layers.*.mlp.2", "2", "[2]"),
    ]  # fmt: skip
    assert len([line for line in every if line.startswith("layers")]) == 10


def test_ranks_that_are_alike_share_a_table() -> None:
    ranks = [seen([one_series(f"layers.{r // 2}.fc", rank=r)], rank=r, world_size=4) for r in range(4)]

    lines = list(plan_lines(plan(*ranks)))

    assert [line for line in lines if line.startswith("one captured step")] == [
        "one captured step of ranks 0-1, each:", "one captured step of ranks 2-3, each:",
    ]  # fmt: skip


def test_the_disk_in_the_job_is_what_the_variables_and_the_file_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert disk_settings({}) == ("captures", None, 0.1)
    assert disk_settings({"CAPD_STORE": "/x", "CAPD_MAX_DISK": "2GB", "CAPD_KEEP_FREE": "5%"}) == (
        "/x",
        2 * 10**9,
        0.05,
    )

    Path("capd.toml").write_text('[daemon]\nstore = "there"\nmax_disk = "500MB"\nkeep_free = "20%"\n')
    assert disk_settings({}) == ("there", 500 * 10**6, 0.2)
    assert disk_settings({"CAPD_MAX_DISK": "1GB"}) == ("there", 10**9, 0.2)
    Path("other.toml").write_text("[daemon]\nkeep_free = 0\n")
    assert disk_settings({"CAPD_CONFIG": "other.toml"}) == ("captures", None, 0)
    Path("other.toml").write_text('[daemon]\nmax_disk = "much"\n')
    with pytest.raises(ConfigError, match="'much' is not a size"):
        disk_settings({"CAPD_CONFIG": "other.toml"})
