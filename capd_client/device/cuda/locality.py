"""The CPUs near a GPU: pages that one of them creates are in the memory that the GPU's link reaches first."""

from __future__ import annotations

import ctypes
import glob
import os
import re

import torch

from capd_client.device.cuda.runtime import cuda_runtimes

__all__ = ["local_cpus", "patience_s"]

# `watch` sets up its devices sooner. If pages come late, the first captures take longer.
_PATIENCE_S = 1.0

_PCI_NBYTES = 32
_PCI = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-7])?")
_CPUS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


def local_cpus(device: torch.device, root: str = "/") -> frozenset[int]:
    """Return the CPUs on the socket of `device`; empty if they are not known. Never raises.

    Args:
        device: A CUDA device that is already in use, because its properties are read.
        root: The directory that contains `sys`.
    """
    # Without CUDA torch asserts.
    errors = (OSError, RuntimeError, ValueError, AttributeError, AssertionError)
    try:
        address = _pci_address(device)
        if address is None:
            return frozenset()
        path = os.path.join(root, "sys/bus/pci/devices", address, "local_cpulist")
        with open(path, encoding="ascii", errors="replace") as file:
            return _cpus(file.read(4096))
    except errors:
        return frozenset()


def patience_s() -> float:
    """Return how long a new arena should wait to learn its GPU, in seconds; 0 in a process that can use none.

    The answer comes without touching a GPU. torch.cuda.is_available() would initialise the driver, and a worker that
    is forked later could not use it.
    """
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's own lack
    return _PATIENCE_S if initialized or _has_gpu() else 0.0


def _has_gpu() -> bool:
    if torch.version.cuda is None and torch.version.hip is None:
        return False
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    # The device files of NVIDIA, of AMD, and of Windows' subsystem for Linux.
    return bool(glob.glob("/dev/nvidia[0-9]*")) or any(map(os.path.exists, ("/dev/kfd", "/dev/dxg")))


def _pci_address(device: torch.device) -> str | None:
    """Return the address as in /sys/bus/pci/devices: 0000:17:00.0."""
    properties = torch.cuda.get_device_properties(device)
    names = [f"pci_{name}_id" for name in ("domain", "bus", "device")]
    if all(hasattr(properties, name) for name in names):
        return "{:04x}:{:02x}:{:02x}.0".format(*(getattr(properties, name) for name in names))
    index = torch.cuda.current_device() if device.index is None else device.index
    # Older versions of torch do not report the address.
    for runtime in cuda_runtimes():
        text = ctypes.create_string_buffer(_PCI_NBYTES)
        if int(runtime.cudaDeviceGetPCIBusId(text, _PCI_NBYTES, index)) == 0:
            found = _PCI.fullmatch(text.value.decode("ascii", "replace").lower())
            return None if found is None else "{}:{}:{}.0".format(*found.groups())
    return None


def _cpus(text: str) -> frozenset[int]:
    """Return the CPUs of a list such as "0-31,64-95". Raises ValueError for any other text."""
    found: set[int] = set()
    for part in text.strip().split(","):
        match = _CPUS.fullmatch(part)
        if match is None:
            raise ValueError(part)
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)
