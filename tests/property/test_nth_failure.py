"""The Nth sync, write or rename fails, for every N until none is left to fail; then the power fails, too."""

from __future__ import annotations

import contextlib
import errno
from typing import Literal

import pytest

from tests.property.kit.faulty_files import Fault
from tests.property.kit.store_driver import Crash
from tests.property.kit.store_machine import StoreMachine

LARGEST = 200
BATCH = [(3, 0, 0, False), (3, 1, 0, False), (4, 0, 1, False), (4, 1, 1, False), (0, 0, 0, False)]


@pytest.mark.slow
@pytest.mark.parametrize("evict", [pytest.param(False, marks=pytest.mark.fault), True])
@pytest.mark.parametrize("kind", ["sync", "write", "rename"])
def test_one_failed_operation_costs_a_durable_store_nothing_it_acknowledged(
    kind: Literal["sync", "write", "rename"], evict: bool
) -> None:
    for after in range(LARGEST):
        machine = StoreMachine()
        with contextlib.ExitStack() as stack:
            stack.push(lambda *_, m=machine: m.teardown())
            machine.begin(durable=True, statistics=False)
            machine.append(batch=BATCH)
            machine.append_to_a_bad_disk(fault=Fault(kind, after, 1, errno.EIO, evict), batch=BATCH)
            machine.seal()
            fired = machine.driver.files.fired
            machine.crash(crash=Crash("power", after))
        if not fired:
            return
    pytest.fail(f"more than {LARGEST} operations, each of them failed")
