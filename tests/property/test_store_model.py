"""The run store against its model: sequences of work, faults, kills and power losses, none of which break a promise."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.store_machine import StoreMachine

# A sequence starts and crashes a store many times over: examples are slow and large, and that is their sense.
SETTINGS = settings(
    deadline=None,
    print_blob=True,
    phases=(
        Phase.explicit,
        Phase.reuse,
        Phase.generate,
        Phase.shrink,
    ),  # explaining takes longer than it helps
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@pytest.mark.timeout(600)  # a failure is shrunk for up to five minutes
def test_no_sequence_of_work_and_faults_breaks_a_promise() -> None:
    run_state_machine_as_test(StoreMachine, settings=settings(SETTINGS, max_examples=50))


@pytest.mark.fault
@pytest.mark.timeout(3600)
def test_no_sequence_of_work_and_faults_breaks_a_promise_in_many_sequences() -> None:
    sequences = int(os.environ.get("MODEL_SEQUENCES", "2000"))
    run_state_machine_as_test(StoreMachine, settings=settings(SETTINGS, max_examples=sequences))
