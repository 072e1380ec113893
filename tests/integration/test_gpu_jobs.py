"""The jobs of the GPU tests run from end to end, here with a stand-in for the device: where there is one they must."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import test_cuda_allocators as allocators
from tests.gpu import test_cuda_capture as capture
from tests.gpu import test_cuda_compile as compiled
from tests.gpu import test_cuda_formats as formats
from tests.gpu import test_cuda_hazards as hazards
from tests.gpu import test_cuda_kills as kills
from tests.gpu import test_cuda_layouts as layouts
from tests.gpu import test_cuda_memory as memory
from tests.gpu import test_cuda_others as others
from tests.gpu import test_cuda_plan as plan
from tests.gpu import test_cuda_policies as policies
from tests.gpu import test_cuda_statistics as statistics
from tests.gpu import test_cuda_wrappers as wrappers
from tests.kit import forking
from tests.kit.gpu.job import PREAMBLE, Job, python_path, same_bits
from tests.kit.processes import Daemon

STAND_IN = "import tests.kit.gpu.stand_in\n"


@pytest.fixture
def job(tmp_path: Path, runtime_dir: Path) -> Iterator[Job]:
    daemon = Daemon(tmp_path / "store", runtime_dir).start()
    yield Job(daemon, tmp_path, STAND_IN + PREAMBLE, popen=forking.popen)
    daemon.discard()


# A test, and what its parameters are.
FAST: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    (capture.test_small_captures_share_copies, (same_bits,)),
    (statistics.test_device_and_daemon_agree, ("stats",)),
    (layouts.test_a_cast_on_the_device_is_torchs_own, ()),
]
SLOW: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    (
        capture.test_tensors_arrive_as_they_were_whatever_happens_to_them_and_no_call_waits,
        (same_bits, "ready"),
    ),
    (policies.test_drop_counts_what_finds_no_room_and_never_waits, ()),
    (hazards.test_a_failed_page_lock_costs_speed_and_nothing_else, (same_bits,)),
    (
        capture.test_tensors_arrive_as_they_were_whatever_happens_to_them_and_no_call_waits,
        (same_bits, "unlocked"),
    ),
    (statistics.test_many_rows_at_once_are_those_of_torchs_operations_and_nothing_waits, (0,)),
    (layouts.test_every_layout_arrives_as_it_was, ()),
    (layouts.test_threads_with_streams_of_their_own_share_a_device, ()),
    (capture.test_a_watched_layer_in_training_forward_and_backward, (same_bits,)),
    (memory.test_the_ring_is_allocated_at_watch, ()),
    (memory.test_immutable_tensors_are_copied_from_where_they_are, (same_bits,)),
    (memory.test_copies_keep_to_the_rate_that_is_allowed, ()),
    (hazards.test_graph_captures_of_other_threads_survive_pending_captures, (same_bits,)),
    (hazards.test_a_static_tap_gives_what_each_replay_computed, (same_bits,)),
    (hazards.test_of_a_rank_killed_amid_its_copies_only_whole_tensors_are_read, ()),
    *((compiled.test_a_compiled_model_is_captured_as_it_computes, (mode,)) for mode in compiled.COMPILED),
    (layouts.test_no_call_waits_for_a_device_that_is_busy, ()),
    (layouts.test_what_is_larger_than_the_ring_comes_in_parts, ()),
    (layouts.test_an_arena_above_two_gibibytes_is_locked_and_used_to_its_end, (1 / 8, 1 << 20)),
    (policies.test_block_drops_nothing, ()),
    (policies.test_stats_keeps_the_statistics_of_what_finds_no_room, ()),
    (policies.test_thin_leaves_out_whole_calls_and_counts_them, ()),
    (policies.test_in_mode_stats_the_row_is_of_the_tensor_as_it_was, ()),
    *((wrappers.test_a_checkpointed_block_is_captured_once, (reentrant,)) for reentrant in (False, True)),
    (wrappers.test_a_sharded_model_is_captured_whole, ()),
    (wrappers.test_graphed_modules_are_captured_around_their_replays, ()),
    (wrappers.test_graphed_modules_run_on_and_one_line_says_that_their_parts_give_nothing, ()),
    (allocators.test_freed_and_reused_memory_under_each_allocator, ("expandable segments",)),
    (kills.test_a_daemon_killed_amid_copies_loses_and_doubles_nothing, ()),
    *(
        (policies.test_a_ring_ordered_by_the_stream_neither_drops_nor_waits, (way,))
        for way in ("block", "drop")
    ),
    (allocators.test_what_is_held_instead_of_copied_has_the_same_bits_or_is_counted, ()),
]


# What is left to a GPU, and why.
NOT_HERE: dict[Callable[..., None], str] = {
    capture.test_all_pages_of_the_arena_are_locked_in_the_background: "asks torch whether memory is page-locked",
    memory.test_device_memory_is_flat_over_a_thousand_captures: "torch counts no memory of the stand-in",
    others.test_uploads_keep_their_rate_beside_captures: "about the link, which the stand-in has not",
    others.test_collectives_keep_their_rate_beside_captures: "the same",
    capture.test_an_error_on_the_device_is_the_jobs_to_tell_and_costs_its_captures_alone: "no kernels, no assertions",
    capture.test_two_devices_in_two_threads: "the stand-in is one device",
    capture.test_a_rank_makes_no_context_on_another_ranks_gpu: "the same",
    statistics.test_on_a_device_that_is_not_the_current_one_as_well: "the same",
    statistics.test_in_the_first_steps_nothing_is_compiled_or_loaded_in_the_job: "compiles kernels for a GPU",
    hazards.test_the_sanitizer_finds_no_missing_wait_between_streams: "below, as far as it runs without the sanitizer",
    formats.test_a_cuda_tensor_has_the_bits_of_the_cpu: "the CPU would be held against itself",
    plan.test_a_plan_of_a_gpu_job_is_what_is_then_captured: "capd plan starts its own process",
}


def test_every_gpu_test_runs_here_or_is_left_out_for_a_reason() -> None:
    modules = (allocators, capture, compiled, formats, hazards, kills, layouts, memory, others, plan, policies,
               statistics, wrappers)  # fmt: skip
    there = {
        value
        for module in modules
        for key, value in vars(module).items()
        if key.startswith("test_") and callable(value)
    }
    files = {path.stem for path in Path(capture.__file__).parent.glob("test_cuda_*.py")}
    assert files == {module.__name__.rpartition(".")[2] for module in modules}
    runs = {test for test, _ in (*FAST, *SLOW)}
    assert not runs & NOT_HERE.keys()
    assert there == runs | NOT_HERE.keys()


def name(case: object) -> str:
    """The same in each worker: the names of functions, not where they lie."""
    if isinstance(case, tuple):
        return "-".join(map(name, case))
    return getattr(case, "__name__", str(case))


@pytest.mark.parametrize(("test", "more"), FAST, ids=name)
def test_it_runs(job: Job, test: Callable[..., None], more: tuple[Any, ...]) -> None:
    test(job, *more)


@pytest.mark.fault
@pytest.mark.parametrize(("test", "more"), SLOW, ids=name)
def test_it_runs_as_well(job: Job, test: Callable[..., None], more: tuple[Any, ...]) -> None:
    test(job, *more)


def test_what_the_sanitizer_looks_at_runs() -> None:
    done = forking.run(
        [sys.executable, "-c", STAND_IN + hazards.SANITIZED, "as it is"],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("clean\n", 0), done.stderr
