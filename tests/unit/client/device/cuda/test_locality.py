"""Which CPUs are near a GPU, by a made-up /sys and torch's word for where the GPU is."""

from __future__ import annotations

import ctypes
import glob
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from capd_client.device.cuda import locality
from capd_client.device.cuda.locality import local_cpus, patience_s

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


class Runtime:
    """A libcudart, of which this call alone is asked."""

    def __init__(self, address: bytes, code: int = 0) -> None:
        self._address, self._code = address, code

    def cudaDeviceGetPCIBusId(self, text: Any, nbytes: int, index: int) -> int:
        assert index == 1
        ctypes.memmove(text, self._address, min(nbytes, len(self._address) + 1))
        return self._code


@pytest.mark.parametrize(
    ("runtimes", "expected"),
    [
        ([Runtime(b"0001:A7:1F.0")], {4}),
        ([Runtime(b"", 101), Runtime(b"0001:A7:1F.0")], {4}),
        ([Runtime(b"nonsense")], set()),
        ([Runtime(b"../../../x")], set()),
        ([object()], set()),
        ([], set()),
    ],
)
def test_where_torch_does_not_say_where_the_device_is_the_runtime_is_asked(
    tmp_path: Path,
    properties: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    runtimes: list[object],
    expected: set[int],
) -> None:
    for name in AT:
        delattr(properties, name)
    monkeypatch.setattr(locality, "cuda_runtimes", lambda: runtimes)
    sysfs(tmp_path, "0001:a7:1f.0", "4")
    assert local_cpus(DEVICE, str(tmp_path)) == expected


def test_a_device_that_cannot_be_asked_is_near_none() -> None:
    if not torch.cuda.is_available():
        assert local_cpus(DEVICE) == frozenset()
    assert local_cpus(torch.device("cpu")) == frozenset()


@pytest.mark.parametrize(
    ("cuda", "hip", "visible", "there", "waits"),
    [
        ("13.0", None, None, ["/dev/nvidia0"], True),
        ("13.0", None, "3", ["/dev/nvidia0"], True),
        ("13.0", None, None, ["/dev/dxg"], True),
        (None, "7.0", None, ["/dev/kfd"], True),
        (None, None, None, ["/dev/nvidia0"], False),
        ("13.0", None, None, [], False),
        ("13.0", None, "", ["/dev/nvidia0"], False),
        ("13.0", None, "-1", ["/dev/nvidia0"], False),
    ],
)
def test_only_a_process_that_may_use_a_gpu_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    hip: str | None,
    visible: str | None,
    there: list[str],
    waits: bool,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(
        glob, "glob", lambda pattern: [path for path in there if path.startswith(pattern[:11])]
    )
    monkeypatch.setattr(os.path, "exists", lambda path: path in there)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (patience_s() > 0) is waits

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert patience_s() == 1.0
