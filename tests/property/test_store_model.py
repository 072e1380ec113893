"""The run store against its model: sequences of work, faults, kills and power losses, none of which break a promise."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property.kit.store_machine import StoreMachine

# A sequence starts and crashes a store many times over: examples are slow and large, and that is their sense.
SETTINGS = settings(
    deadline=None,
    print_blob=True,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def test_no_sequence_of_work_and_faults_breaks_a_promise() -> None:
    """The same sequences every time; a failure is printed as it is, because shrinking takes minutes."""
    some = settings(
        SETTINGS, max_examples=10, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
    )
    run_state_machine_as_test(StoreMachine, settings=some)


@pytest.mark.fault
@pytest.mark.timeout(3600)
def test_no_sequence_of_work_and_faults_breaks_a_promise_in_many_sequences() -> None:
    """New sequences every time; MODEL_SEQUENCES says how many."""
    many = settings(
        SETTINGS,
        max_examples=int(os.environ.get("MODEL_SEQUENCES", "500")),
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    )
    run_state_machine_as_test(StoreMachine, settings=many)
