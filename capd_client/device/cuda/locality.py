"""The CPUs near a GPU: pages that one of them creates are in the memory that the GPU's link reaches first."""

from __future__ import annotations

import os
import re

import torch

__all__ = ["local_cpus"]

# The parts of an address as in /sys/bus/pci/devices: 0000:17:00.0.
_PCI = ("domain", "bus", "device")
_CPUS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


def local_cpus(device: torch.device, root: str = "/") -> frozenset[int]:
    """Return the CPUs on the socket of `device`; empty if they are not known. Never raises.

    Args:
        device: A CUDA device that is already in use, because its properties are read.
        root: The directory that contains `sys`.
    """
    # Without CUDA torch asserts. Older versions of torch do not report the address.
    errors = (OSError, RuntimeError, ValueError, AttributeError, AssertionError)
    try:
        properties = torch.cuda.get_device_properties(device)
        address = "{:04x}:{:02x}:{:02x}.0".format(*(getattr(properties, f"pci_{part}_id") for part in _PCI))
        path = os.path.join(root, "sys/bus/pci/devices", address, "local_cpulist")
        with open(path, encoding="ascii", errors="replace") as file:
            return _cpus(file.read(4096))
    except errors:
        return frozenset()


def _cpus(text: str) -> frozenset[int]:
    """Return the CPUs of a list such as "0-31,64-95". Raises ValueError for any other text."""
    found: set[int] = set()
    for part in text.strip().split(","):
        match = _CPUS.fullmatch(part)
        if match is None:
            raise ValueError(part)
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)
