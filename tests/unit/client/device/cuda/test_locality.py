"""Which CPUs are near a GPU, by a made-up /sys and torch's word for where the GPU is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from capd_client.device.cuda.locality import local_cpus

DEVICE = torch.device("cuda", 1)
AT = {"pci_domain_id": 0, "pci_bus_id": 0xA7, "pci_device_id": 0}


@pytest.fixture
def properties(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What torch says of the device."""
    found = SimpleNamespace(**AT)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    return found


def sysfs(root: Path, address: str, text: str) -> None:
    path = root / "sys/bus/pci/devices" / address / "local_cpulist"
    path.parent.mkdir(parents=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-3,8-9\n", {0, 1, 2, 3, 8, 9}),
        ("5\n", {5}),
        ("\n", set()),
        ("0-", set()),
        ("all", set()),
        ("0-99999999999", set()),
    ],
)
def test_the_cpus_are_those_that_the_system_names(
    tmp_path: Path, properties: SimpleNamespace, text: str, expected: set[int]
) -> None:
    sysfs(tmp_path, "0000:a7:00.0", text)
    assert local_cpus(DEVICE, str(tmp_path)) == expected


def test_a_device_that_the_system_does_not_know_is_near_none(
    tmp_path: Path, properties: SimpleNamespace
) -> None:
    assert local_cpus(DEVICE, str(tmp_path)) == frozenset()


def test_where_torch_does_not_say_where_the_device_is_it_is_near_none(
    tmp_path: Path, properties: SimpleNamespace
) -> None:
    del properties.pci_bus_id
    sysfs(tmp_path, "0000:a7:00.0", "4")
    assert local_cpus(DEVICE, str(tmp_path)) == frozenset()


def test_a_device_that_cannot_be_asked_is_near_none() -> None:
    if not torch.cuda.is_available():
        assert local_cpus(DEVICE) == frozenset()
    assert local_cpus(torch.device("cpu")) == frozenset()
